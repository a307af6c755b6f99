"""The columns beside predictions in a table: file and target of each example, predicted class, rejection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

Column = Tensor | list[str]  # one entry a row
UNKNOWN = -1  # the target of an example without one, or out of distribution


def origins(datasets: Sequence[Any], dataloader_idx: Tensor, index: Tensor) -> dict[str, Column]:
    """The origin of each row.

    Args:
        datasets: The data set of each loader. Its attributes ``file_names`` and ``targets`` are read, through a ``Subset``
            too; of a ``TensorDataset`` a last tensor of integers counts as the targets.
        dataloader_idx: The loader of each row, ``[rows]``.
        index: The row's position in its data set, ``[rows]``.

    Returns:
        ``file`` and ``target``, each if it is known for any row; the others have ``""`` and -1.

    Example:
        >>> data = TensorDataset(torch.zeros(3, 2), torch.tensor([5, 6, 7]))
        >>> origins([data], torch.tensor([0, 0]), torch.tensor([2, 0]))
        {'target': tensor([7, 5])}
    """
    places = list(zip(dataloader_idx.tolist(), index.tolist(), strict=True))
    files, targets = [_file_names(each) for each in datasets], [_targets(each) for each in datasets]
    named = [str(files[loader][row]) if files[loader] is not None else "" for loader, row in places]
    aims = torch.tensor(
        [int(targets[loader][row]) if targets[loader] is not None else UNKNOWN for loader, row in places]
    )
    found: dict[str, Column] = {"file": named} if any(named) else {}
    return found | ({"target": aims} if bool((aims != UNKNOWN).any()) else {})


def decisions(probs: Tensor, class_names: Sequence[str], reject_below: float | None) -> dict[str, Column]:
    """The predicted class of each row, and whether it is rejected.

    Args:
        probs: Probabilities, ``[rows, classes]``; other shapes have no one class.
        class_names: Names of the classes; they are not used if their number is another.
        reject_below: A prediction is rejected if its largest probability is smaller; None rejects none.

    Returns:
        ``label``, names or else numbers, and ``reject``, bool, with a threshold.

    Example:
        >>> decisions(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), ["cat", "dog"], 0.8)
        {'label': ['cat', 'dog'], 'reject': tensor([False,  True])}
    """
    if probs.ndim != 2:
        return {}
    classes = probs.argmax(1)
    is_named = len(class_names) == probs.shape[1]
    label: Column = [str(class_names[number]) for number in classes.tolist()] if is_named else classes
    return {"label": label} | ({"reject": probs.amax(1) < reject_below} if reject_below is not None else {})


def flat(table: dict[str, Column], class_names: Sequence[str]) -> dict[str, list[Any]]:
    """The table with one number or text in each cell, for CSV and Parquet.

    Args:
        table: Columns ``[rows, …]``.
        class_names: Names of the classes, which name the columns of ``probs``.

    Returns:
        Columns of ``[rows]``; short ones come first.

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
    for number, name in enumerate(names):
        yield from _flat(f"{key}_{name}", column[:, number], ())


def _file_names(dataset: Any) -> Sequence[Any] | None:
    if isinstance(dataset, Subset):
        names = _file_names(dataset.dataset)
        return None if names is None else [names[i] for i in dataset.indices]
    return getattr(dataset, "file_names", None)


def _targets(dataset: Any) -> Sequence[Any] | Tensor | None:
    if isinstance(dataset, Subset):
        targets = _targets(dataset.dataset)
        return None if targets is None else [targets[i] for i in dataset.indices]
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) > 1:
        last = dataset.tensors[-1]
        return last if last.ndim == 1 and not last.is_floating_point() else None
    found: Sequence[Any] | Tensor | None = getattr(dataset, "targets", None)
    return found if isinstance(found, (Tensor, list, tuple)) and len(found) == len(dataset) else None
