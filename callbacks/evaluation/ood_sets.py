"""OOD detection for a module of the user: the test loaders that the data module's ``ood_names`` name, against the test set.

The zoo's `BayesClassifier` logs the same keys itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_bayes.callbacks.evaluation.sampled_network import SampledCall
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.metrics import OODDetection
from lightning_bayes.predictive import SampledModule, ood_scores


def ends_test_set(trainer: Trainer, batch_idx: int, dataloader_idx: int = 0) -> bool:
    """Whether the first loader of a test ends with this batch; values that are logged now stand under this loader alone."""
    return dataloader_idx == 0 and batch_idx + 1 == trainer.num_test_batches[0]


def ood_sets(trainer: Trainer, module: LightningModule) -> OODSets | None:
    """The OOD sets of a test; None without ``ood_names``, and for a module that scores them itself."""
    datamodule = getattr(trainer, "datamodule", None)
    names = tuple(getattr(datamodule, "ood_names", None) or ())
    if not trainer.testing or not names or isinstance(module, SampledModule):
        return None
    count = len(trainer.num_test_batches)
    if len(names) > count - 1 or len(set(names)) < len(names):
        raise HyperparameterError(
            f"{type(datamodule).__name__}.ood_names is {list(names)}, but test_dataloader returns {count - 1} loaders after "
            "the test set's. Name each set that follows it once, in loader order."
        )
    return OODSets(names, module)


@final
class OODSets:
    """Collects the scores of the test set and of the OOD sets, and logs ``ood/...`` with the last batch of the last set.

    A step has to call ``self(inputs)`` once, for logits ``[batch, classes]``.
    """

    def __init__(self, names: Sequence[str], module: LightningModule) -> None:
        self._names, self._module = tuple(names), module
        self._metric: OODDetection | None = None  # built with the first batch, which knows the scores
        self._seen: set[int] = set()

    def add(self, trainer: Trainer, call: SampledCall | None, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add the outputs of a step's only call of ``forward``."""
        if dataloader_idx > len(self._names):
            return
        outputs = None if call is None else call.outputs
        if isinstance(outputs, Tensor) and outputs.ndim == 3:  # [samples, batch, classes]
            scores = ood_scores(outputs if len(outputs) > 1 else outputs[0])
            self._metric = self._metric or OODDetection(self._names, tuple(scores)).to(outputs.device)
            self._metric.update(scores, dataloader_idx)
            self._seen.add(dataloader_idx)
        if dataloader_idx == len(self._names) and batch_idx + 1 == trainer.num_test_batches[dataloader_idx]:
            self._log()

    def _log(self) -> None:
        sets = ("the test set", *map(str, self._names))
        if missing := [name for index, name in enumerate(sets) if index not in self._seen]:
            rank_zero_warn(
                f"{type(self._module).__name__}.test_step has no logits [batch, classes] from one call of self(inputs) for "
                f"{', '.join(missing)}, so ood/... is not logged. Call self(inputs) for every loader."
            )
        elif self._metric is not None:
            values: dict[str, Any] = self._metric.compute()
            self._module.log_dict(values, on_epoch=True, add_dataloader_idx=False, batch_size=1)
