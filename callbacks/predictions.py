"""Writes the predictions of ``trainer.predict`` as one table: tensors, CSV or Parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_bayes.callbacks.evaluation.prediction_table import (
    Column,
    decisions,
    origins,
    require_format,
    save,
    unreadable,
)
from lightning_bayes.callbacks.trainer.arguments import checked
from lightning_bayes.callbacks.trainer.neighbours import callbacks_of
from lightning_bayes.callbacks.trainer.stated_likelihood import LINK_ATTRIBUTE
from lightning_bayes.likelihood import OutputLikelihood, find_kind
from lightning_bayes.predictive import as_dict, check_threshold

FILENAME = "predictions.pt"


@final
class PredictionWriter(BasePredictionWriter):
    """Writes ``predictions.pt``, or a CSV or Parquet file: one row per example of all predict data loaders.

    The columns are the entries of the dict that ``predict_step`` returns: with a `VariationalCallback`, ``probs``,
    ``entropy`` and ``mutual_information`` (in nats), or ``mean`` and ``variance``. Without samples and with Lightning's
    default ``predict_step``, the module's ``lightning_bayes_link`` converts its output to the same columns, with a mutual
    information of 0; without it, the output becomes the column ``outputs``.

    If the data set provides them, ``file`` and ``target`` are added. With probabilities, ``label`` (the class name if the
    module or the data module has ``class_names``) and ``reject`` are added. Two columns locate a row: ``dataloader_idx``,
    and ``index``, the position in the data set, if Lightning provides it. A ``.pt`` file loads with
    ``torch.load(path, weights_only=True)``. CSV and Parquet split ``probs`` into one column per class, such as
    ``probs_cat``. Several processes write ``predictions_rank0.pt`` and so on.

    Args:
        dirpath: Folder to write to; None uses the run's folder, ``trainer.log_dir``.
        filename: Name of the file. Its extension, ``.pt``, ``.csv`` or ``.parquet``, sets the format.
        reject_below: Marks predictions whose largest probability is below this threshold in the column ``reject``; None
            writes no such column.

    Raises:
        HyperparameterError: If the extension is unknown, or the threshold is not a probability.
        ModuleNotFoundError: If Parquet needs a package that is not installed.
    """

    @checked
    def __init__(self, dirpath: str | None = None, filename: str = FILENAME, reject_below: float | None = None) -> None:
        super().__init__("epoch")
        require_format(filename)
        check_threshold(reject_below)
        self.dirpath, self.filename, self.reject_below = dirpath, filename, reject_below

    @property
    def is_default(self) -> bool:
        """Whether all arguments are defaults, so that another writer replaces this one."""
        return (self.dirpath, self.filename, self.reject_below) == (None, FILENAME, None)

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        """Write the table; an existing file is replaced."""
        # log_dir is a collective, so every process reads it.
        folder = trainer.log_dir if self.dirpath is None else self.dirpath
        if trainer.fast_dev_run or folder is None or self._is_replaced(trainer):  # type: ignore[attr-defined]
            return
        loaders = [predictions] if trainer.predict_loop.num_dataloaders == 1 else predictions
        rows = [
            columns(output, stated_kind(pl_module)) | {"dataloader_idx": torch.tensor(index)}
            for index, outputs in enumerate(loaders)
            for output in outputs
        ]
        table = stack(rows)
        if table is None:
            rank_zero_warn(
                f"{type(pl_module).__name__}.predict_step returned no table, so {self.filename} is not written. Return "
                "a tensor, or a dict of tensors, with one row per example and the same columns for every batch."
            )
            return
        positions = [index for batches in batch_indices for batch in batches for index in batch]
        own: dict[str, Column] = {}
        errors: dict[str, Column] = {}
        is_unreadable = None
        if len(positions) == len(table["dataloader_idx"]):
            index = torch.tensor(positions)
            datasets = [getattr(loader, "dataset", None) for loader in _as_list(trainer.predict_dataloaders)]
            is_unreadable, errors = unreadable(datasets, table, index)
            own = {"index": index, **origins(datasets, table["dataloader_idx"], index), **errors}
        names = class_names_of(trainer, pl_module)
        if "probs" in table:
            own |= decisions(table["probs"], names, self.reject_below, is_unreadable)
        all_columns = {**table, **own, **table}  # columns of the same name are predict_step's
        path = Path(folder) / filename(trainer, self.filename)
        save(all_columns, path, names)
        missing = sum(map(bool, errors.get("error", [])))
        count = len(table["dataloader_idx"]) - missing
        rest = f" {missing} files could not be read: their rows say why in the column error." if missing else ""
        rank_zero_info(f"{count} predictions ({', '.join(all_columns)}) are in {path}.{rest}")

    def _is_replaced(self, trainer: Trainer) -> bool:
        return self.is_default and not all(writer.is_default for writer in callbacks_of(trainer, PredictionWriter))


def class_names_of(trainer: Trainer, module: LightningModule) -> tuple[str, ...]:
    """The class names of the module, which its checkpoint holds, else of the data module; empty if neither has a list."""
    owners = (module, getattr(trainer, "datamodule", None))
    lists = (getattr(owner, "class_names", None) for owner in owners)
    return next((tuple(map(str, names)) for names in lists if names and isinstance(names, (list, tuple))), ())


def _as_list(loaders: Any) -> list[Any]:
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]


def stated_kind(module: LightningModule) -> OutputLikelihood | None:
    """The kind that a module's ``lightning_bayes_link`` names; None without it, and for a ``predict_step`` of its own."""
    overrides_step = type(module).predict_step is not LightningModule.predict_step
    link = None if overrides_step else getattr(module, LINK_ATTRIBUTE, None)
    return None if link is None else find_kind(link, LINK_ATTRIBUTE)


def columns(output: Any, kind: OutputLikelihood | None) -> dict[str, Tensor]:
    """The tensors of one batch's prediction by name; a tensor alone becomes a prediction of a kind, or ``outputs``."""
    if isinstance(output, Tensor):
        return {"outputs": output} if kind is None else as_dict(kind.summarise(output[None]))
    return _named(output)


def _named(output: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of nested dictionaries and tuples, by names such as ``value_mean``; lists hold no columns."""
    if isinstance(output, Tensor):
        return {prefix.rstrip("_"): output}
    is_tuple = isinstance(output, tuple)
    children = enumerate(output) if is_tuple else output.items() if isinstance(output, dict) else ()
    return {name: leaf for key, value in children for name, leaf in _named(value, f"{prefix}{key}_").items()}


def stack(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor] | None:
    """Concatenate batches ``[batch, …]`` or scalars on the CPU; None if the columns of the batches do not match."""
    lengths = [{len(value) for value in row.values() if value.ndim > 0} for row in rows]
    shapes = [{name: value.shape[1:] for name, value in row.items()} for row in rows]
    if not rows or any(len(batch) != 1 for batch in lengths) or any(shape != shapes[0] for shape in shapes):
        return None
    counts = [batch.pop() for batch in lengths]
    return {
        name: torch.cat([row[name].expand(n, *shapes[0][name]) for row, n in zip(rows, counts, strict=True)]).cpu()
        for name in rows[0]
    }


def filename(trainer: Trainer, name: str = FILENAME) -> str:
    """The file name of this process. Each process writes its own file, so that no process waits for another."""
    path = Path(name)
    return name if trainer.world_size == 1 else f"{path.stem}_rank{trainer.global_rank}{path.suffix}"
