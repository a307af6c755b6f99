"""Writes the predictions of ``trainer.predict`` as one table: tensors, CSV or Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_bayes.callbacks.prediction_files import require_format, save
from lightning_bayes.callbacks.prediction_table import Column, decisions, origins
from lightning_bayes.predictive import Link, as_dict, check_threshold, summarise

FILENAME = "predictions.pt"


@final
class PredictionWriter(BasePredictionWriter):
    """Writes ``predictions.pt``, or a CSV or Parquet file: one row per example over all predict data loaders.

    Columns are the entries of the dict that ``predict_step`` returns: with a `VariationalCallback` ``probs``,
    ``entropy`` and ``mutual_information`` (in nats), or ``mean`` and ``variance``. Without samples and with Lightning's own
    ``predict_step``, the module's attribute ``link`` turns its output into the same columns (the mutual information is
    then 0); without a ``link`` the output is the column ``outputs``. Where the data know them, ``file`` and ``target``
    follow; with probabilities ``label``, by its name if the module's or the data module's ``class_names`` tell it, and
    ``reject``. Two more columns locate a row: ``dataloader_idx``, and ``index``, the position in the data set, if Lightning
    knows it. A ``.pt`` file loads with ``torch.load(path, weights_only=True)``; in CSV and Parquet the column ``probs`` is
    one for each class, such as ``probs_cat``. Several processes write ``predictions_rank0.pt`` and so on.

    Args:
        dirpath: Folder to write to; None takes the run's own, ``trainer.log_dir``.
        filename: Name of the file; its ending, ``.pt``, ``.csv`` or ``.parquet``, decides the format.
        reject_below: Predictions whose largest probability is smaller are marked in the column ``reject``; None writes no
            such column.

    Raises:
        HyperparameterError: If the ending is unknown, or the threshold is not a probability. If Parquet needs a package that
            is not installed, it is a ModuleNotFoundError.
    """

    def __init__(self, dirpath: str | None = None, filename: str = FILENAME, reject_below: float | None = None) -> None:
        super().__init__("epoch")
        require_format(filename)
        check_threshold(reject_below)
        self.dirpath, self.filename, self.reject_below = dirpath, filename, reject_below

    @property
    def is_default(self) -> bool:
        """Whether nothing was asked for; another writer then takes this one's place."""
        return (self.dirpath, self.filename, self.reject_below) == (None, FILENAME, None)

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        """Write the table; an existing file is replaced.

        Args:
            trainer: The trainer.
            pl_module: The module.
            predictions: The results of ``predict_step``, by batch, or by data loader and batch.
            batch_indices: Positions of the examples in their data sets, by data loader and batch.
        """
        folder = trainer.log_dir if self.dirpath is None else self.dirpath  # on every process: log_dir communicates
        if trainer.fast_dev_run or folder is None or self._is_replaced(trainer):  # type: ignore[attr-defined]
            return
        temperature = getattr(pl_module, "temperature", None) or 1.0
        loaders = [predictions] if trainer.predict_loop.num_dataloaders == 1 else predictions
        rows = [
            columns(output, link_of(pl_module), temperature) | {"dataloader_idx": torch.tensor(number)}
            for number, outputs in enumerate(loaders)
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
        whole: dict[str, Column] = {**table}
        if len(positions) == len(table["dataloader_idx"]):
            index = torch.tensor(positions)
            datasets = [getattr(each, "dataset", None) for each in _as_list(trainer.predict_dataloaders)]
            whole |= {"index": index, **origins(datasets, table["dataloader_idx"], index)}
        names = class_names_of(trainer, pl_module)
        if "probs" in table:
            whole |= decisions(table["probs"], names, self.reject_below)
        path = Path(folder) / filename(trainer, self.filename)
        save(whole, path, names)
        rank_zero_info(f"{len(table['dataloader_idx'])} predictions ({', '.join(whole)}) are in {path}")

    def _is_replaced(self, trainer: Trainer) -> bool:
        writers = [each for each in trainer.callbacks if isinstance(each, PredictionWriter)]  # type: ignore[attr-defined]
        return self.is_default and not all(writer.is_default for writer in writers)


def class_names_of(trainer: Trainer, module: LightningModule) -> tuple[str, ...]:
    """The names of the classes: the module's, which its checkpoint holds, else the data module's.

    Returns:
        The names; none if neither knows them.
    """
    data = getattr(trainer, "datamodule", None)
    names = getattr(module, "class_names", None) or getattr(data, "class_names", None) or ()
    return tuple(map(str, names))


def _as_list(loaders: Any) -> list[Any]:
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]


def link_of(module: LightningModule) -> Link | None:
    """The link of a module whose outputs `trainer.predict` returns as they are.

    Returns:
        Its attribute ``link``; None without one, and for a ``predict_step`` of the user's own.
    """
    own_step = type(module).predict_step is not LightningModule.predict_step
    return None if own_step else getattr(module, "link", None)


def columns(output: Any, link: Link | None, temperature: float = 1.0) -> dict[str, Tensor]:
    """The named parts of one batch's prediction.

    Args:
        output: A tensor or a dict; entries other than tensors are ignored.
        link: How a tensor becomes a prediction; None keeps it as it is.
        temperature: A tensor of logits is divided by it.

    Returns:
        Tensors, ``[batch, …]`` each; empty if the output has another type.

    Example:
        >>> columns(torch.zeros(2, 4), "softmax")["entropy"]
        tensor([1.3863, 1.3863])
    """
    if isinstance(output, Tensor):
        return {"outputs": output} if link is None else as_dict(summarise(output[None] / temperature, link))
    return {k: v for k, v in output.items() if isinstance(v, Tensor)} if isinstance(output, dict) else {}


def stack(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor] | None:
    """Concatenate batches.

    Args:
        rows: One dict per batch, of tensors ``[batch, …]``; scalars hold for the whole batch.

    Returns:
        One tensor ``[rows, …]`` per column, on the CPU; None if the batches do not fit together.

    Example:
        >>> stack([{"p": torch.tensor([0.5, 0.1]), "set": torch.tensor(0)}, {"p": torch.zeros(1), "set": torch.tensor(1)}])
        {'p': tensor([0.5000, 0.1000, 0.0000]), 'set': tensor([0, 0, 1])}
    """
    lengths = [{len(value) for value in row.values() if value.ndim > 0} for row in rows]
    shapes = [{name: value.shape[1:] for name, value in row.items()} for row in rows]
    if not rows or any(len(found) != 1 for found in lengths) or any(shape != shapes[0] for shape in shapes):
        return None
    counts = [found.pop() for found in lengths]
    return {
        name: torch.cat([row[name].expand(n, *shapes[0][name]) for row, n in zip(rows, counts, strict=True)]).cpu()
        for name in rows[0]
    }


def filename(trainer: Trainer, name: str = FILENAME) -> str:
    """The name of a process's file; one file per process, so that none waits for another.

    Args:
        trainer: The trainer.
        name: That of a single process.

    Returns:
        The name.
    """
    path = Path(name)
    return name if trainer.world_size == 1 else f"{path.stem}_rank{trainer.global_rank}{path.suffix}"
