"""Figures of a test: calibration, selective prediction, out-of-distribution detection and shift."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning_utilities.core.rank_zero import rank_zero_info
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_bayes.callbacks.trainer.arguments import checked
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.likelihood import Categorical
from lightning_bayes.metrics import (
    by_severity,
    reliability_diagram,
    risk_coverage_diagram,
    score_histograms,
    shift_curves,
)
from lightning_bayes.metrics.example_scores import SCORES_FILE, write_scores
from lightning_bayes.predictive import ood_scores


class Predicted(NamedTuple):
    """Predictions of a whole test."""

    probs: dict[str, Tensor]  # probabilities of the test set by kind of prediction, [examples, classes]
    targets: Tensor  # targets of the test set, [examples]
    scores: dict[str, dict[str, Tensor]]  # out-of-distribution scores by name of the score and of the set, [inputs]


class StepOutputs(NamedTuple):
    """Logits and targets of a test batch, on the CPU. Logits have at least single precision."""

    outputs: Tensor  # [samples, batch, classes]
    targets: Tensor  # [batch]

    @staticmethod
    def of(returned: Any) -> StepOutputs | None:
        """Those that a step has returned; None if it has not."""
        outputs, targets = map(returned.get, ("outputs", "targets")) if isinstance(returned, Mapping) else (None, None)
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.ndim not in {2, 3}:
            return None
        outputs = outputs.detach().cpu().to(torch.promote_types(outputs.dtype, torch.float32))
        return StepOutputs(outputs if outputs.ndim == 3 else outputs.unsqueeze(0), targets.detach().cpu())

    @property
    def are_of_classes(self) -> bool:
        """Whether the outputs are logits of a classifier, and the targets one class index per example."""
        outputs, targets = self
        is_index = targets.ndim == 1 and not targets.is_floating_point() and not targets.is_complex()
        return is_index and outputs.shape[-1] > 1 and outputs.shape[-2] == len(targets)

    def are_usable(self, of_classes: bool = True) -> bool:
        """Whether the logits are finite, and the targets are `of_classes` that the classifier knows."""
        outputs, targets = self
        inside = (targets >= 0) & (targets < outputs.shape[-1])
        return bool(outputs.isfinite().all()) and (not of_classes or bool(inside.all()))


class CollectedPredictions:
    """Collects probabilities of the test set, and out-of-distribution scores of the test set and of other sets."""

    def __init__(self) -> None:
        self._probs: dict[str, list[Tensor]] = {}
        self._targets: list[Tensor] = []
        self._scores: dict[str, dict[str, list[Tensor]]] = {}

    def add(self, step: StepOutputs, set_name: str, mean_outputs: Tensor | None) -> None:
        """Add a batch."""
        probs = Categorical().summarise(step.outputs).probs
        if set_name == "test":
            kinds = {"prediction" if mean_outputs is None else "posterior": probs}
            if mean_outputs is not None:
                kinds["mean"] = mean_outputs.detach().cpu().float().softmax(-1)
            for kind, values in kinds.items():
                self._probs.setdefault(kind, []).append(values)
            self._targets.append(step.targets)
        if set_name == "test" or set_name.startswith("ood/"):
            outputs = step.outputs if len(step.outputs) > 1 else step.outputs[0]
            for score, values in ood_scores(outputs).items():
                self._scores.setdefault(score, {}).setdefault(set_name.removeprefix("ood/"), []).append(values)

    def gathered(self, gather: Callable[[Tensor], Tensor]) -> Predicted | None:
        """The predictions of all processes; None without a batch of the test set."""
        if not self._targets:
            return None
        probs = {kind: gather(torch.cat(batches)) for kind, batches in self._probs.items()}
        scores = {
            score: {name: gather(torch.cat(batches)) for name, batches in sets.items()}
            for score, sets in self._scores.items()
        }
        return Predicted(probs, gather(torch.cat(self._targets)), scores)


@final
class EvaluationFigures(Callback):
    """Draws the results of a test, writes them to the run's folder ``figures``, and logs them.

    The PNG files are ``reliability``, ``risk_coverage``, ``ood_scores`` (with out-of-distribution sets) and ``shift`` (with
    shifted test sets). TensorBoard, Weights & Biases, MLflow and Comet log them as ``test/reliability`` and so on. With a
    posterior, each figure compares the average over its samples with the prediction at the mean.

    The scores of each example are written to ``scores.csv``, from which ``lightning-bayes report`` compares runs in pairs.
    The module's ``test_step`` must return ``{"outputs": logits, "targets": classes}`` and may add ``mean_outputs`` and
    ``set``, as `lightning_bayes.zoo.BayesClassifier` does. The probabilities of the test set are held in memory.

    Args:
        dirpath: Folder to write to. None: ``figures`` in the run's folder ``trainer.log_dir``, or in the trainer's
            ``default_root_dir`` if the logger has no folder.
        required: Whether to raise an error if the module does not return its logits. If False, no figures are drawn for it.
    """

    @checked
    def __init__(self, dirpath: str | None = None, required: bool = True) -> None:
        self.dirpath, self.required = dirpath, required
        self._forget()

    def _forget(self) -> None:
        self._collected = CollectedPredictions()
        self._is_left_alone = False  # because of a batch that cannot be drawn

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discard the results of an earlier test."""
        self._forget()

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Collect the results of a batch."""
        step = StepOutputs.of(outputs)
        if step is None or not step.are_of_classes:
            if self.required:
                raise _refusal(pl_module, outputs, step)
            return
        name = outputs.get("set", f"ood/set{dataloader_idx}" if dataloader_idx else "test")
        if not self.required and not step.are_usable(of_classes=not name.startswith("ood/")):
            self._is_left_alone = True
            return
        self._collected.add(step, name, outputs.get("mean_outputs"))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw, write and log."""
        folder = trainer.log_dir or trainer.default_root_dir  # log_dir is a collective, so every process reads it
        predicted = self._collected.gathered(partial(_gathered, trainer, pl_module))
        is_left_alone = self._is_left_alone
        self._forget()
        if is_left_alone:
            rank_zero_info(
                "EvaluationFigures: some targets are no classes, or outputs are not finite, so nothing is drawn."
            )
            return
        if predicted is None or not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        figures = draw(predicted, trainer.callback_metrics)
        target = Path(folder) / "figures" if self.dirpath is None else Path(self.dirpath)
        publish(figures, target, trainer)
        write_scores(target / SCORES_FILE, next(iter(predicted.probs.values())), predicted.targets)


def _refusal(module: LightningModule, returned: Any, step: StepOutputs | None) -> UnsupportedTrainingError:
    """The error for a step that is no classifier's."""
    name = f"{type(module).__name__}.test_step returned"
    if step is None:
        return UnsupportedTrainingError(
            f"{name} a {type(returned).__name__} without logits."
            ' Return {"outputs": logits, "targets": targets}, as lightning_bayes.zoo.BayesClassifier does.'
        )
    shapes = tuple(returned["outputs"].shape), tuple(returned["targets"].shape)
    return UnsupportedTrainingError(
        f"EvaluationFigures draws classifiers, with logits [batch, classes] and class indices [batch], but {name} outputs "
        f"{shapes[0]} and targets {shapes[1]} of {returned['targets'].dtype}. Remove the callback, or pass required=False."
    )


def draw(predicted: Predicted, logged: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw the figures of a test."""
    curves = {kind: (probs, predicted.targets) for kind, probs in predicted.probs.items()}
    figures = {"reliability": reliability_diagram(curves), "risk_coverage": risk_coverage_diagram(curves)}
    if len(next(iter(predicted.scores.values()))) > 1:
        figures["ood_scores"] = score_histograms(predicted.scores)
    first = next(iter(predicted.probs))
    shifts = {}
    for kind, suffix in ((first, ""), ("mean", "_mean")):
        if severities := by_severity(logged, suffix):
            shifts[kind] = severities
    if shifts:
        figures["shift"] = shift_curves(shifts)
    return figures


def publish(figures: Mapping[str, Figure], folder: Path, trainer: Trainer) -> None:
    """Write figures into a folder, and log them with the loggers that support figures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png")
    unsupported = []
    for logger in trainer.loggers:
        log = _figure_logger(logger, folder, trainer.global_step)
        if log is not None:
            for name, figure in figures.items():
                log(name, figure)
        elif not isinstance(logger, CSVLogger):  # its folder holds the figures
            unsupported.append(type(logger).__name__)
    note = f"; {', '.join(unsupported)} cannot log figures" if unsupported else ""
    rank_zero_info(f"{len(figures)} figures ({', '.join(figures)}) are in {folder}{note}")


def _figure_logger(logger: Any, folder: Path, step: int) -> Callable[[str, Figure], Any] | None:
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_figure"):  # TensorBoard
        return lambda name, figure: experiment.add_figure(f"test/{name}", figure, step)
    if hasattr(logger, "log_image"):  # Weights & Biases
        return lambda name, _: logger.log_image(key=f"test/{name}", images=[str(folder / f"{name}.png")])
    if hasattr(experiment, "log_figure") and hasattr(logger, "run_id"):  # MLflow
        return lambda name, figure: experiment.log_figure(logger.run_id, figure, f"test/{name}.png")
    if hasattr(experiment, "log_figure"):  # Comet
        return lambda name, figure: experiment.log_figure(f"test/{name}", figure, step=step)
    return None


def _gathered(trainer: Trainer, module: LightningModule, values: Tensor) -> Tensor:
    """The tensors of all processes, concatenated along the first dimension."""
    if trainer.world_size == 1:
        return values
    return torch.cat(gather_all_tensors(values.to(module.device))).cpu()
