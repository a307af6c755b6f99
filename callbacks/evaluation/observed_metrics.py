"""Scores of real-valued targets in a test, for any module whose loss or argument states their distribution."""

from __future__ import annotations

from typing import Any, final

from lightning.pytorch import LightningModule

from lightning_bayes.callbacks.evaluation.sampled_network import SampledCall
from lightning_bayes.errors import DataError
from lightning_bayes.likelihood import Observed, ReadOutput, ScoredOutput, read_output
from lightning_bayes.likelihood.paths import mapped
from lightning_bayes.metrics import observed_metrics


@final
class ObservedMetrics:
    """``test/reg/{RMSE,NLL,coverage,width}`` under the samples of each step's only call of ``self(...)``."""

    def __init__(self, scored: ScoredOutput, interval: float) -> None:
        self.scored, self.interval = scored, interval
        self.metrics = observed_metrics("test/")

    def add(self, call: SampledCall, batch: Any) -> None:
        """Score a batch; targets that are not known are left out."""
        known, outputs = targets_of(self.scored, call.outputs, batch), self.scored.parts_of(call.outputs)
        if known is None:
            return
        prediction = self.scored.kind.summarise(outputs, self.interval)
        assert isinstance(prediction, Observed)
        if known.targets.numel() != prediction.mean.numel():
            return
        targets = known.targets.reshape(prediction.mean.shape).to(prediction.mean.dtype)
        counts = slice(None) if known.mask is None else known.mask.reshape(targets.shape)
        densities = self.scored.kind.log_densities(outputs, targets)
        self.metrics.to(targets.device)
        self.metrics.update(
            mean=prediction.mean[counts],
            variance=(prediction.aleatoric + prediction.epistemic)[counts],
            lower=prediction.lower[counts],
            upper=prediction.upper[counts],
            log_densities=densities if known.mask is None else densities[:, counts],
            target=targets[counts],
        )

    def log(self, module: LightningModule) -> None:
        """Log the scores of the test, unless nothing was scored or the module has logged them."""
        if any(metric.update_called for metric in self.metrics.values()):
            logged = module.trainer.callback_metrics
            values = {name: value for name, value in self.metrics.compute().items() if name not in logged}
            module.log_dict(values)


def targets_of(scored: ScoredOutput, outputs: Any, batch: Any) -> ReadOutput | None:
    """The targets of outputs ``[S, …]`` as the training loss took them; None if only the training step can tell them."""
    if not scored.targets.is_known:
        return None
    try:
        return read_output(scored, mapped(lambda leaf: leaf[0], scored.parts_of(outputs)), batch)
    except (DataError, LookupError, AttributeError, RuntimeError):  # another batch or output than in training
        return None
