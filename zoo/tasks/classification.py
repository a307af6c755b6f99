"""Classification: cross-entropy, calibration, selective classification and out-of-distribution detection.

    loss = -mean_i log p(y_i | x_i, θ)

An input's score for being out of distribution is the entropy of its predicted class probabilities, in nats.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics import MetricCollection

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.metrics import classification_metrics, ood_metrics
from lightning_bayes.zoo.tasks.base import SupervisedTask, split_batch


@final
class BayesClassifier(SupervisedTask):
    """An ordinary classifier, ready for any callback of this package; without one it trains as it stands.

    Logged are ``train/loss``, ``val/loss``, ``{val,test}/cls/{Acc,NLL,Brier}``, ``{val,test}/cal/{ECE,MCE,aECE}`` and
    ``{val,test}/sc/AURC``. If ``test_dataloader`` gives a list, its first loader is the test set and every other one
    an out-of-distribution set, whose targets are not looked at: ``ood/{AUROC,AUPR,FPR95}`` compares the test set with
    all of these sets together and, where there are several, ``ood/{name}/...`` with each of them. The names are the
    data module's ``ood_names``, else ``set1``, ``set2``, and so on.

    ``trainer.predict`` returns logits; with a callback of this package the Bayesian predictive instead.

    Args:
        model: Network from inputs to logits ``[batch, num_classes]``.
        num_classes: Number of classes, at least 2.
        optimizer: Called with the network's parameters; Adam with its default learning rate of 1e-3 if not given.
        lr_scheduler: Called with the optimizer, stepped once per epoch; None keeps the learning rate.

    Raises:
        HyperparameterError: If ``num_classes`` is below 2.

    Example:
        >>> task = BayesClassifier(nn.Linear(4, 3), num_classes=3)
        >>> task((torch.zeros(2, 4), torch.tensor([0, 1]))).shape  # a whole batch, as predict_step passes it
        torch.Size([2, 3])
    """

    link: ClassVar[str] = "softmax"  # callbacks read how an output becomes a prediction

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        if num_classes < 2:
            raise HyperparameterError(
                f"BayesClassifier got num_classes={num_classes}, but needs at least 2: one logit for each class."
            )
        val_metrics = classification_metrics(num_classes, prefix="val/")
        test_metrics = classification_metrics(num_classes, prefix="test/")
        super().__init__(model, optimizer, lr_scheduler, val_metrics, test_metrics)
        self.num_classes = num_classes
        self._ood_metrics: list[MetricCollection] = []  # all sets together, then each of several

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

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Feed the validation metrics.

        Args:
            batch: Inputs, and class indices ``[batch]``.
            batch_idx: Position in the epoch.
        """
        inputs, targets = self._labelled(batch)
        logits = self._logits(inputs)
        self.log("val/loss", F.cross_entropy(logits, targets), prog_bar=True, batch_size=len(targets), sync_dist=True)
        self.val_metrics.update(logits.softmax(-1), targets)

    def on_test_epoch_start(self) -> None:
        """Prepare fresh metrics, those of out-of-distribution detection by the number of loaders."""
        super().on_test_epoch_start()
        num_sets = len(self.trainer.num_test_batches) - 1
        prefixes = ["ood/"] if num_sets > 0 else []
        if num_sets > 1:
            prefixes += [f"ood/{name}/" for name in self._ood_names(num_sets)]
        self._ood_metrics = [ood_metrics(prefix=prefix).to(self.device) for prefix in prefixes]

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Feed the test metrics.

        Args:
            batch: Inputs, and class indices ``[batch]``.
            batch_idx: Position in the epoch.
            dataloader_idx: 0 for the test set, above for sets out of distribution.
        """
        inputs, targets = self._labelled(batch) if dataloader_idx == 0 else split_batch(batch)
        probs = self._logits(inputs).softmax(-1)
        if dataloader_idx == 0:
            self.test_metrics.update(probs, targets)
        self._update_ood(torch.special.entr(probs).sum(-1), dataloader_idx)

    def on_test_epoch_end(self) -> None:
        """Log the test metrics and those of out-of-distribution detection."""
        super().on_test_epoch_end()
        for metrics in self._ood_metrics:
            self.log_metrics(metrics)

    def _labelled(self, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = split_batch(batch)
        check_targets(targets, self.num_classes)
        return inputs, targets

    def _logits(self, inputs: Tensor) -> Tensor:
        # self(...), not self.model(...): evaluation callbacks replace forward by the Monte-Carlo average.
        logits: Tensor = self(inputs)
        if logits.shape != (len(inputs), self.num_classes):
            raise ShapeError(
                f"{type(self.model).__name__} returned {list(logits.shape)} for {len(inputs)} inputs, but "
                f"num_classes={self.num_classes} needs [{len(inputs)}, {self.num_classes}]. "
                "Give both the same number of classes."
            )
        return logits.to(torch.promote_types(logits.dtype, torch.float32))  # the softmax of 16-bit logits in 32 bits

    def _update_ood(self, scores: Tensor, dataloader_idx: int) -> None:
        is_ood = torch.full_like(scores, dataloader_idx > 0, dtype=torch.long)
        for position, metrics in enumerate(self._ood_metrics):
            if dataloader_idx == 0 or position in {0, dataloader_idx}:
                metrics.update(scores, is_ood)

    def _ood_names(self, num_sets: int) -> list[str]:
        datamodule = getattr(self.trainer, "datamodule", None)
        names = list(getattr(datamodule, "ood_names", None) or [f"set{i + 1}" for i in range(num_sets)])
        if len(names) != num_sets or len(set(names)) != num_sets:
            raise HyperparameterError(
                f"{type(datamodule).__name__}.ood_names is {names}, but test_dataloader gives {num_sets} sets after "
                "the test set. Name each of them once, in their order."
            )
        return names


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
    if targets.ndim != 1 or targets.is_floating_point():
        raise ShapeError(
            f"Targets must be class indices, one integer per example, [batch], but are {targets.dtype} of shape "
            f"{list(targets.shape)}. Turn one-hot targets into indices with targets.argmax(-1)."
        )
    wrong = targets[(targets < 0) | (targets >= num_classes)]
    if len(wrong) > 0:
        raise HyperparameterError(
            f"Found the targets {sorted(set(wrong.tolist()))}, but num_classes={num_classes} allows 0 to "
            f"{num_classes - 1}. Raise num_classes, or count the classes from 0."
        )
