"""Writes tables of predictions: ``.pt`` with tensors, ``.csv`` or ``.parquet`` with one value per cell."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from lightning_bayes.callbacks.prediction_table import Column, flat
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.posteriors import atomic_save, atomic_write

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
