"""Classification: cross-entropy, calibration, selective classification and out-of-distribution detection.

    loss = -mean_i log p(y_i | x_i, θ)

The out-of-distribution score of an input is the entropy of its predicted class probabilities, in nats. Other scores are
reported beside it.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics import MetricCollection

from lightning_bayes.curvature import Likelihood, Softmax
from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.metrics import classification_metrics
from lightning_bayes.predictive import OOD_SCORES, combine
from lightning_bayes.zoo.create import known_architecture
from lightning_bayes.zoo.tasks.base import SupervisedTask, split_batch
from lightning_bayes.zoo.tasks.evaluation import ClassifierEvaluation, EvaluationSets, named_sets

POINT_SCORES = tuple(name for name in OOD_SCORES if name != "mutual_information")  # which needs samples


@final
class BayesClassifier(SupervisedTask):
    """An ordinary classifier, which any callback of this package makes Bayesian.

    It logs ``train/loss``, ``val/loss`` and the ``{val,test}/{cls,cal,sc,mis}/...`` of `classification_metrics`. Under a
    posterior, a test logs every metric twice: of the average over samples under the keys below, and of the posterior mean
    under ``test_mean/...``, ``ood_mean/...`` and ``shift_mean/...``.

    If ``test_dataloader`` returns a list, its first loader is the test set. Sets out of distribution follow, named by the
    data module's ``ood_names``, else ``set1``, ``set2``, and so on; their targets are ignored. ``ood/{AUROC,AUPR,FPR95}``
    compares the test set with all of these sets together by entropy. With several sets, ``ood/{set}/...`` compares it with
    each. ``ood/{set}/{score}/...`` uses each of the scores ``entropy, max_probability, mutual_information`` (of samples
    only), ``energy, max_logit``.

    Shifted copies of the test set come last, with the kinds and severities in the data module's ``shift_names``, such as
    ``("fog", 3)``. Their keys are ``shift/{kind}/{severity}/...``, see `lightning_bayes.metrics.ShiftMetrics`.

    With a ``temperature``, which the callback ``TemperatureScaling`` sets, ``test/post/...`` has the metrics of the test set
    after scaling. Steps return logits and targets, for callbacks.

    ``trainer.predict`` returns logits; with a callback of this package it returns the Bayesian predictive.

    Args:
        model: Network from inputs to logits ``[batch, num_classes]``.
        num_classes: Number of classes, at least 2; None takes that of the network: its attribute ``num_classes``, or the one
            that `create_model` built it for.
        optimizer: Called with the network's parameters; Adam with its default learning rate of 1e-3 if not given.
        lr_scheduler: Called with the optimizer, stepped once per epoch; None keeps the learning rate.

    Raises:
        HyperparameterError: If ``num_classes`` is below 2, or not known.

    Example:
        >>> task = BayesClassifier(nn.Linear(4, 3), num_classes=3)
        >>> task((torch.zeros(2, 4), torch.tensor([0, 1]))).shape  # a whole batch, as predict_step passes it
        torch.Size([2, 3])
    """

    link: ClassVar[str] = "softmax"  # from an output to a prediction; callbacks read it
    likelihood: ClassVar[Likelihood] = Softmax()  # of the labels that the Fisher draws

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
                f"BayesClassifier got num_classes={num_classes}, but needs at least 2: one logit for each class."
            )
        val_metrics = classification_metrics(num_classes, prefix="val/")
        test_metrics = classification_metrics(num_classes, prefix="test/")
        super().__init__(model, optimizer, lr_scheduler, val_metrics, test_metrics)
        self.num_classes = num_classes
        self.temperature: float | None = None  # divides logits, of every posterior sample
        self.class_names: tuple[str, ...] = ()  # of the data module of the last fit; checkpoints hold them
        self._sets = EvaluationSets()
        self._evaluations: dict[str, ClassifierEvaluation] = {}  # by way to predict: "test", "test_mean", "test/post"

    def setup(self, stage: str) -> None:
        """Take the class names of the data.

        Args:
            stage: A fit takes them.
        """
        names = getattr(getattr(self.trainer, "datamodule", None), "class_names", ())
        if stage == "fit" and len(names) == self.num_classes:
            self.class_names = tuple(map(str, names))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the class names.

        Args:
            checkpoint: The contents of the file.
        """
        checkpoint["class_names"] = list(self.class_names)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the class names.

        Args:
            checkpoint: The contents of the file.
        """
        self.class_names = tuple(checkpoint.get("class_names", ()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean cross-entropy of the batch.

        Args:
            batch: Inputs, and class indices ``[batch]``.
            batch_idx: Position in the epoch.

        Returns:
            The loss, a scalar in nats.
        """
        inputs, targets = self._labelled(batch)
        loss = F.cross_entropy(self._logits(inputs), targets)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Update the validation metrics.

        Args:
            batch: Inputs, and class indices ``[batch]``.
            batch_idx: Position in the epoch.

        Returns:
            ``outputs``, the logits ``[samples, batch, classes]``, and ``targets``.
        """
        inputs, targets = self._labelled(batch)
        outputs = self._sampled(inputs)
        log_probs = combine(outputs, "softmax")
        self.log("val/loss", F.nll_loss(log_probs, targets), prog_bar=True, batch_size=len(targets), sync_dist=True)
        self.val_metrics.update(log_probs.exp(), targets)
        return {"outputs": outputs, "targets": targets}

    def on_test_epoch_start(self) -> None:
        """Build the metrics for the loaders and the ways to predict."""
        super().on_test_epoch_start()
        self._sets = named_sets(getattr(self.trainer, "datamodule", None), len(self.trainer.num_test_batches))
        scores = tuple(OOD_SCORES) if self.averages else POINT_SCORES
        evaluations = {"test": ClassifierEvaluation(self.test_metrics, self._sets, "", scores, device=self.device)}
        if self.mean_forward is not None:
            metrics = self._metrics("test_mean/")
            evaluations["test_mean"] = ClassifierEvaluation(
                metrics, self._sets, "_mean", POINT_SCORES, device=self.device
            )
        if self.temperature is not None:
            metrics = self._metrics("test/post/")
            evaluations["test/post"] = ClassifierEvaluation(
                metrics, EvaluationSets(), temperature=self.temperature, device=self.device
            )
        self._evaluations = evaluations

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Update the test metrics.

        Args:
            batch: Inputs, and class indices ``[batch]``.
            batch_idx: Position in the epoch.
            dataloader_idx: 0 for the test set; larger for the sets that follow it.

        Returns:
            ``outputs``, the logits ``[samples, batch, classes]``; ``targets``; ``set``, the name of the loader's set; and
            ``mean_outputs``, ``[batch, classes]``, if the outputs are samples.
        """
        is_ood = 0 < dataloader_idx <= len(self._sets.ood)
        inputs, targets = split_batch(batch) if is_ood else self._labelled(batch)
        outputs = self._sampled(inputs)
        step: dict[str, Any] = {"outputs": outputs, "targets": targets, "set": self._sets.names()[dataloader_idx]}
        if self.mean_forward is not None:
            mean = self.mean_forward(inputs)
            step["mean_outputs"] = self._checked(mean, mean.shape, len(inputs))
        for name, evaluation in self._evaluations.items():
            used = step["mean_outputs"].unsqueeze(0) if name == "test_mean" else outputs
            evaluation.update(used, targets, dataloader_idx)
        return step

    def on_test_epoch_end(self) -> None:
        """Log all metrics of the test."""
        for evaluation in self._evaluations.values():
            # compute() has reduced over all processes, as in log_metrics
            self.log_dict(evaluation.compute(), sync_dist=True)
        if self.temperature is not None:
            self.log("test/post/temperature", self.temperature, sync_dist=True)

    def _metrics(self, prefix: str) -> MetricCollection:
        return classification_metrics(self.num_classes, prefix=prefix).to(self.device)

    def _labelled(self, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = split_batch(batch)
        check_targets(targets, self.num_classes)
        return inputs, targets.long()  # F.cross_entropy takes 64-bit integers and bytes only

    def _logits(self, inputs: Tensor) -> Tensor:
        # self(...), not self.model(...): callbacks and DDP see forward.
        logits: Tensor = self(inputs)
        return self._checked(logits, logits.shape, len(inputs))

    def _sampled(self, inputs: Tensor) -> Tensor:
        outputs = self.sampled_forward(inputs)
        return self._checked(outputs, outputs.shape[1:], len(inputs))

    def _checked(self, logits: Tensor, shape: torch.Size, num_inputs: int) -> Tensor:
        if shape != (num_inputs, self.num_classes):
            raise ShapeError(
                f"{type(self.model).__name__} returned {list(shape)} for {num_inputs} inputs, but "
                f"num_classes={self.num_classes} needs [{num_inputs}, {self.num_classes}]. "
                "Give both the same number of classes."
            )
        return logits.to(torch.promote_types(logits.dtype, torch.float32))  # the softmax of 16-bit logits in 32 bits


def _class_count(model: nn.Module) -> int:
    """The number of classes that a network says it has."""
    built = known_architecture(model)
    known = built.arguments["num_classes"] if built is not None else getattr(model, "num_classes", None)
    if not isinstance(known, int):
        raise HyperparameterError(f"{type(model).__name__} does not tell its number of classes. Pass num_classes.")
    return known


def check_targets(targets: Tensor, num_classes: int) -> None:
    """Refuse targets that are not class indices.

    Args:
        targets: Class indices, ``[batch]``, of an integer type.
        num_classes: Number of classes C; an index must lie in [0, C).

    Raises:
        ShapeError: If the targets are not one integer per example.
        HyperparameterError: If an index lies outside of [0, C).

    Example:
        >>> check_targets(torch.tensor([0, 2]), num_classes=3)
    """
    if targets.ndim != 1 or targets.is_floating_point() or targets.dtype == torch.bool:
        raise ShapeError(
            f"Targets must be class indices, one integer per example, [batch], but are {targets.dtype} of shape "
            f"{list(targets.shape)}. Turn one-hot targets into indices with targets.argmax(-1), booleans with "
            "targets.long()."
        )
    wrong = targets[(targets < 0) | (targets >= num_classes)]
    if len(wrong) > 0:
        raise HyperparameterError(
            f"Found the targets {sorted(set(wrong.tolist()))}, but num_classes={num_classes} allows 0 to "
            f"{num_classes - 1}. Raise num_classes, or count the classes from 0."
        )
