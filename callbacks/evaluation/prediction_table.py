"""Additional columns of a prediction table: file and target of each example, predicted class, rejection."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.posteriors import atomic_save, atomic_write

Column = Tensor | list[str]  # one entry per row
UNKNOWN = -1  # target of an example without a label, or out of distribution


def origins(datasets: Sequence[Any], dataloader_idx: Tensor, index: Tensor) -> dict[str, Column]:
    """The columns ``file`` and ``target``, if known for any row; unknown are ``""``, -1 for whole numbers, else ``nan``."""
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


def unreadable(datasets: Sequence[Any], table: Mapping[str, Tensor], index: Tensor) -> tuple[Tensor, dict[str, Column]]:
    """Which rows are NaN because their file cannot be read (`ImageSet.keeps_unreadable`); the column ``error`` if any is."""
    values = [value.flatten(1) for value in map(_as_rows, table.values()) if value.is_floating_point()]
    suspects = torch.cat([value.isnan().any(1, keepdim=True) for value in values], 1).any(1) if values else index < 0
    errors = [""] * len(index)
    for row in suspects.nonzero().flatten().tolist():
        dataset, position = datasets[int(table["dataloader_idx"][row])], int(index[row])
        if getattr(dataset, "keeps_unreadable", False):
            errors[row] = dataset.error_of(position)
    is_unreadable = torch.tensor([bool(error) for error in errors], dtype=torch.bool)
    return is_unreadable, {"error": errors} if any(errors) else {}


def _as_rows(value: Tensor) -> Tensor:
    return value[:, None] if value.ndim == 1 else value


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


def decisions(
    probs: Tensor, class_names: Sequence[str], reject_below: float | None, is_unreadable: Tensor | None = None
) -> dict[str, Column]:
    """The predicted class of each row, by name if it fits, and whether it is rejected; without an input, none and True."""
    if probs.ndim != 2:
        return {}
    is_missing = torch.zeros(len(probs), dtype=torch.bool) if is_unreadable is None else is_unreadable
    classes = probs.argmax(1).masked_fill(is_missing, UNKNOWN)
    has_names = len(class_names) == probs.shape[1]
    names = [*map(str, class_names), ""]  # the last for UNKNOWN
    label: Column = [names[index] for index in classes.tolist()] if has_names else classes
    columns = {"label": label}
    if reject_below is not None:
        columns["reject"] = (probs.amax(1) < reject_below) | is_missing
    return columns


def flat(table: dict[str, Column], class_names: Sequence[str]) -> dict[str, list[Any]]:
    """One number or text per cell, for CSV and Parquet; columns that were one-dimensional come first."""
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


FORMATS: Final = (".pt", ".csv", ".parquet")
_NOUN, _ADVICE = "predictions", "Free space, or choose another directory."


def require_format(path: str) -> None:
    """Require a file format that can be written, before predictions are computed."""
    extension = Path(path).suffix
    if extension not in FORMATS:
        raise HyperparameterError(
            f"{path}: predictions are written as {', '.join(FORMATS)}, not as {extension or 'a file without extension'}."
        )
    if extension == ".parquet" and find_spec("pyarrow") is None:
        raise ModuleNotFoundError(
            f'{path} needs pyarrow, which is not installed. Run: pip install "lightning-bayes[parquet]", or use .csv.'
        )


def save(table: dict[str, Column], path: Path, class_names: Sequence[str] = ()) -> None:
    """Write a table of columns ``[rows, …]`` in the format of the file's extension."""
    if path.suffix == ".pt":
        atomic_save(path, table, _NOUN, _ADVICE)
    else:
        write = _csv if path.suffix == ".csv" else _parquet
        atomic_write(path, write(flat(table, class_names)), _NOUN, _ADVICE)


def _csv(columns: dict[str, list[Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue().encode()


def _parquet(columns: dict[str, list[Any]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()
