"""Classification: cross-entropy, calibration, selective classification and out-of-distribution detection.

    loss = -mean_i log p(y_i | x_i, θ)

The main out-of-distribution score of an input is the entropy of its predicted class probabilities, in nats. Other scores
are reported as well.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.likelihood import Categorical, OutputLikelihood
from lightning_bayes.metrics import classification_metrics
from lightning_bayes.predictive import OOD_SCORES
from lightning_bayes.zoo.create import known_architecture
from lightning_bayes.zoo.tasks.base import SupervisedTask, split_batch
from lightning_bayes.zoo.tasks.evaluation import ClassifierEvaluation, EvaluationSets, named_sets

# Scores of a point estimate; mutual information needs several samples.
POINT_SCORES = tuple(name for name in OOD_SCORES if name != "mutual_information")


@final
class BayesClassifier(SupervisedTask):
    """An ordinary classifier. Any callback of this package makes it Bayesian.

    Batches are inputs and class indices ``[batch]``. The task logs ``train/loss``, ``val/loss`` and the
    ``{val,test}/{cls,cal,sc,mis}/...`` metrics of `classification_metrics`. Under a posterior, a test logs every metric
    twice: for the average over samples under the keys below, and for the posterior mean under ``test_mean/...``,
    ``ood_mean/...`` and ``shift_mean/...``.

    If ``test_dataloader`` returns a list, its first loader is the test set. Out-of-distribution sets follow, named by the
    data module's ``ood_names``, or else ``set1``, ``set2``, …; their targets are ignored. ``ood/{AUROC,AUPR,FPR95}``
    compares the test set with the union of these sets by entropy. With several sets, ``ood/{set}/...`` compares the test set
    with each of them. ``ood/{set}/{score}/...`` uses the scores ``entropy``, ``max_probability``, ``energy``, ``max_logit``
    and, with several samples, ``mutual_information``. ``test/n`` is the number of test examples, ``test/cls/NLL_SE`` the
    standard error of their NLL, and ``test/cls/MI`` their mean mutual information.

    Shifted copies of the test set come last, with the kinds and severities in the data module's ``shift_names``, such as
    ``("fog", 3)``. Their keys are ``shift/{kind}/{severity}/...``, see `lightning_bayes.metrics.ShiftMetrics`.

    Validation and test steps return logits and targets for callbacks.

    ``trainer.predict`` returns logits. With a callback of this package it returns the Bayesian predictive distribution.

    Args:
        model: Network from inputs to logits ``[batch, num_classes]``.
        num_classes: Number of classes, at least 2. None reads it from `create_model`'s arguments or from the network's
            attribute ``num_classes``.
        optimizer: Called with the network's parameters. The default is Adam with its default learning rate of 1e-3.
        lr_scheduler: Called with the optimizer, stepped once per epoch; None keeps the learning rate constant.

    Raises:
        HyperparameterError: If ``num_classes`` is below 2, or unknown.
    """

    lightning_bayes_link: ClassVar[str] = "softmax"  # how callbacks turn outputs into predictions
    lightning_bayes_likelihood: ClassVar[OutputLikelihood] = (
        Categorical()
    )  # distribution of the sampled labels of a Fisher estimate

    def __init__(
        self,
        model: nn.Module,
        num_classes: int | None = None,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        num_classes = _class_count(model) if num_classes is None else num_classes
        if num_classes < 2:
            raise HyperparameterError(
                f"BayesClassifier got num_classes={num_classes}, but needs at least 2, with one logit per class."
            )
        val_metrics = classification_metrics(num_classes, prefix="val/")
        test_metrics = classification_metrics(num_classes, prefix="test/")
        super().__init__(model, optimizer, lr_scheduler, val_metrics, test_metrics)
        self.num_classes = num_classes
        self.class_names: tuple[str, ...] = ()  # from the data module of the last fit, saved in checkpoints
        self._sets = EvaluationSets()
        self._evaluations: dict[str, ClassifierEvaluation] = {}  # by predictor: "test", "test_mean"

    def setup(self, stage: str) -> None:
        """Read the class names from the data module of a fit."""
        names = getattr(getattr(self.trainer, "datamodule", None), "class_names", ())
        if stage == "fit" and len(names) == self.num_classes:
            self.class_names = tuple(map(str, names))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the class names."""
        checkpoint["class_names"] = list(self.class_names)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the class names."""
        self.class_names = tuple(checkpoint.get("class_names", ()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean cross-entropy of the batch, a scalar in nats."""
        inputs, targets = self._labelled(batch)
        loss = F.cross_entropy(self._logits(inputs), targets)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Update the validation metrics. Returns ``outputs``, the logits ``[samples, batch, classes]``, and ``targets``."""
        inputs, targets = self._labelled(batch)
        outputs = self._sampled(inputs)
        log_probs = Categorical().combine(outputs)
        self.log("val/loss", F.nll_loss(log_probs, targets), prog_bar=True, batch_size=len(targets), sync_dist=True)
        self.val_metrics.update(log_probs.exp(), targets)
        return {"outputs": outputs, "targets": targets}

    def on_test_epoch_start(self) -> None:
        """Build the metrics of each predictor for the test loaders."""
        super().on_test_epoch_start()
        self._sets = named_sets(getattr(self.trainer, "datamodule", None), len(self.trainer.num_test_batches))
        scores = tuple(OOD_SCORES) if self.averages else POINT_SCORES
        evaluations = {"test": ClassifierEvaluation(self.test_metrics, self._sets, "", scores, device=self.device)}
        if self.mean_forward is not None:
            metrics = classification_metrics(self.num_classes, prefix="test_mean/").to(self.device)
            evaluations["test_mean"] = ClassifierEvaluation(
                metrics, self._sets, "_mean", POINT_SCORES, device=self.device
            )
        self._evaluations = evaluations

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Update the test metrics; return logits ``[samples, batch, classes]``, targets, set and the mean's logits."""
        is_ood = 0 < dataloader_idx <= len(self._sets.ood)
        inputs, targets = split_batch(batch) if is_ood else self._labelled(batch)
        outputs = self._sampled(inputs)
        step: dict[str, Any] = {"outputs": outputs, "targets": targets, "set": self._sets.names()[dataloader_idx]}
        if self.mean_forward is not None:
            mean = self.mean_forward(inputs)
            step["mean_outputs"] = self._checked(mean, mean.shape, len(inputs))
        for name, evaluation in self._evaluations.items():
            logits = step["mean_outputs"].unsqueeze(0) if name == "test_mean" else outputs
            evaluation.update(logits, targets, dataloader_idx)
        return step

    def on_test_epoch_end(self) -> None:
        """Log all metrics of the test."""
        for evaluation in self._evaluations.values():
            # compute() reduces over all processes, as in log_metrics.
            self.log_dict(evaluation.compute(), sync_dist=True)

    def _labelled(self, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = split_batch(batch)
        check_targets(targets, self.num_classes)
        return inputs, targets.long()  # F.cross_entropy accepts only int64 and uint8

    def _logits(self, inputs: Tensor) -> Tensor:
        # self(...) rather than self.model(...), because callbacks and DDP hook into forward
        logits: Tensor = self(inputs)
        return self._checked(logits, logits.shape, len(inputs))

    def _sampled(self, inputs: Tensor) -> Tensor:
        outputs = self.sampled_forward(inputs)
        return self._checked(outputs, outputs.shape[1:], len(inputs))

    def _checked(self, logits: Tensor, shape: torch.Size, num_inputs: int) -> Tensor:
        if shape != (num_inputs, self.num_classes):
            raise ShapeError(
                f"{type(self.model).__name__} returned shape {list(shape)} for {num_inputs} inputs, but "
                f"num_classes={self.num_classes} requires [{num_inputs}, {self.num_classes}]. "
                "Use the same number of classes for the task and the network."
            )
        return logits.to(torch.promote_types(logits.dtype, torch.float32))  # softmax in at least 32 bits


def _class_count(model: nn.Module) -> int:
    """The number of classes according to `create_model`'s arguments or the network's attribute."""
    built = known_architecture(model)
    num_classes = built.arguments["num_classes"] if built is not None else getattr(model, "num_classes", None)
    if not isinstance(num_classes, int):
        raise HyperparameterError(f"The number of classes of {type(model).__name__} is unknown. Pass num_classes.")
    return num_classes


def check_targets(targets: Tensor, num_classes: int) -> None:
    """Check that targets are class indices."""
    if targets.ndim != 1 or targets.is_floating_point() or targets.dtype == torch.bool:
        raise ShapeError(
            f"Targets must be class indices [batch], one integer per example, but are {targets.dtype} of shape "
            f"{list(targets.shape)}. Convert one-hot targets with targets.argmax(-1), booleans with targets.long()."
        )
    wrong = targets[(targets < 0) | (targets >= num_classes)]
    if len(wrong) > 0:
        raise HyperparameterError(
            f"Found targets {sorted(set(wrong.tolist()))}, but num_classes={num_classes} allows 0 to {num_classes - 1}. "
            "Raise num_classes, or number the classes from 0."
        )
