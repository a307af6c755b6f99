"""Additional columns of a prediction table: file and target of each example, predicted class, rejection."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

Column = Tensor | list[str]  # one entry per row
UNKNOWN = -1  # target of an example without a label, or out of distribution


def origins(datasets: Sequence[Any], dataloader_idx: Tensor, index: Tensor) -> dict[str, Column]:
    """File and target of each row.

    Args:
        datasets: The data set of each loader. Its attributes ``file_names`` and ``targets`` are read, also through a
            ``Subset``. In a ``TensorDataset``, the last of several tensors counts as the targets.
        dataloader_idx: Index of each row's loader, ``[rows]``.
        index: Position of each row in its data set, ``[rows]``.

    Returns:
        The columns ``file`` and ``target``, each if known for any row. Targets are written as they are: numbers, rows of
        numbers, or texts. Unknown entries are ``""``, -1 for whole numbers, and ``nan`` for others.

    Example:
        >>> data = TensorDataset(torch.zeros(3, 2), torch.tensor([5, 6, 7]))
        >>> origins([data], torch.tensor([0, 0]), torch.tensor([2, 0]))
        {'target': tensor([7, 5])}
    """
    files = [_column(data, lambda data: getattr(data, "file_names", None)) for data in datasets]
    targets = [_column(data, _targets) for data in datasets]
    row_files: list[str] = []
    row_targets: list[Any] = []
    for loader, row in zip(dataloader_idx.tolist(), index.tolist(), strict=True):
        row_files.append("" if files[loader] is None else str(files[loader][row]))
        row_targets.append(None if targets[loader] is None else targets[loader][row])
    columns: dict[str, Column] = {"file": row_files} if any(row_files) else {}
    target = target_column(row_targets)
    return columns if target is None else {**columns, "target": target}


def target_column(targets: Sequence[Any]) -> Column | None:
    """One column of targets of any kind, unknown ones being None; None if all are unknown."""
    known = [target for target in targets if target is not None]
    if not known:
        return None
    try:
        tensors = [torch.as_tensor(target) for target in known]
        first = torch.stack(tensors)[0]
    except (TypeError, ValueError, RuntimeError):  # texts, objects, or rows of several lengths
        return ["" if target is None else str(target) for target in targets]
    unknown = torch.full_like(first, math.nan if first.is_floating_point() else UNKNOWN)
    if first.dtype == torch.bool:
        unknown = unknown.new_zeros(unknown.shape)
    values = iter(tensors)
    column = torch.stack([unknown if target is None else next(values) for target in targets])
    is_unlabelled = not column.is_floating_point() and first.dtype != torch.bool and bool((column == UNKNOWN).all())
    return None if is_unlabelled else column


def decisions(probs: Tensor, class_names: Sequence[str], reject_below: float | None) -> dict[str, Column]:
    """The predicted class of each row, and whether it is rejected.

    Args:
        probs: Probabilities, ``[rows, classes]``; other shapes give no columns.
        class_names: Names of the classes; ignored unless their number matches.
        reject_below: Predictions whose largest probability is below this threshold are rejected; None for no threshold.

    Returns:
        The column ``label``, with names or else class indices; with a threshold also ``reject``, bool.

    Example:
        >>> decisions(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), ["cat", "dog"], 0.8)
        {'label': ['cat', 'dog'], 'reject': tensor([False,  True])}
    """
    if probs.ndim != 2:
        return {}
    classes = probs.argmax(1)
    has_names = len(class_names) == probs.shape[1]
    label: Column = [str(class_names[index]) for index in classes.tolist()] if has_names else classes
    columns = {"label": label}
    if reject_below is not None:
        columns["reject"] = probs.amax(1) < reject_below
    return columns


def flat(table: dict[str, Column], class_names: Sequence[str]) -> dict[str, list[Any]]:
    """Flatten a table to one number or text per cell, for CSV and Parquet.

    Args:
        table: Columns ``[rows, …]``.
        class_names: Names of the classes, which name the columns of ``probs``.

    Returns:
        Columns ``[rows]``; those that were one-dimensional come first.

    Example:
        >>> flat({"probs": torch.tensor([[0.25, 0.75]]), "file": ["a.png"]}, ["cat", "dog"])
        {'file': ['a.png'], 'probs_cat': [0.25], 'probs_dog': [0.75]}
    """
    columns = sorted(table.items(), key=lambda column: isinstance(column[1], Tensor) and column[1].ndim > 1)
    return {name: cells for key, column in columns for name, cells in _flat(key, column, class_names)}


def _flat(key: str, column: Column, class_names: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    if isinstance(column, list) or column.ndim == 1:
        yield key, column if isinstance(column, list) else column.tolist()
        return
    names = class_names if key == "probs" and len(class_names) == column.shape[1] else range(column.shape[1])
    for index, name in enumerate(names):
        yield from _flat(f"{key}_{name}", column[:, index], ())


def _column(dataset: Any, read: Callable[[Any], Any]) -> Any:
    """The result of `read` for a data set, also through a ``Subset``: a sequence or None."""
    if not isinstance(dataset, Subset):
        return read(dataset)
    column = _column(dataset.dataset, read)
    return None if column is None else [column[i] for i in dataset.indices]


def _targets(dataset: Any) -> Sequence[Any] | Tensor | None:
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) > 1:
        return dataset.tensors[-1]
    attribute: Any = getattr(dataset, "targets", None)
    return attribute if isinstance(attribute, (Tensor, list, tuple)) and len(attribute) == len(dataset) else None
