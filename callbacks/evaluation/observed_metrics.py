"""Scores of real-valued targets in a test, for any module whose loss or argument states their distribution."""

from __future__ import annotations

from typing import Any, final

from lightning.pytorch import LightningModule
from torch.distributions import Distribution

from lightning_bayes.callbacks.evaluation.sampled_forward import SampledCall
from lightning_bayes.errors import DataError
from lightning_bayes.likelihood import Likelihood, ReadOutput, read_output
from lightning_bayes.likelihood.base import num_samples
from lightning_bayes.likelihood.paths import mapped
from lightning_bayes.metrics import observed_metrics
from lightning_bayes.predictive import Observation
from lightning_bayes.predictive.observations import log_densities, observed


@final
class ObservedMetrics:
    """``test/reg/{RMSE,NLL,coverage,width}`` under the samples of each step's only call of ``self(...)``."""

    def __init__(self, observation: Observation, likelihood: Likelihood, interval: float) -> None:
        self.observation, self.likelihood, self.interval = observation, likelihood, interval
        self.metrics = observed_metrics("test/")

    def add(self, call: SampledCall, batch: Any) -> None:
        """Score a batch; targets that are not known are left out."""
        known = targets_of(self.likelihood, call.outputs, batch)
        if known is None:
            return
        distribution, samples = distribution_of(self.observation, call.outputs)
        prediction = observed(distribution, samples, self.interval)
        if known.targets.numel() != prediction.mean.numel():
            return
        targets = known.targets.reshape(prediction.mean.shape).to(prediction.mean.dtype)
        counts = slice(None) if known.mask is None else known.mask.reshape(targets.shape)
        densities = log_densities(distribution, samples, targets)
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


def distribution_of(observation: Observation, outputs: Any) -> tuple[Distribution, int]:
    """The targets' distribution under each sample of outputs ``[S, B, …]``, with batch ``[S · B, …]``, and S."""
    return observation(mapped(lambda leaf: leaf.flatten(0, 1), outputs)), num_samples(outputs)


def targets_of(likelihood: Likelihood, outputs: Any, batch: Any) -> ReadOutput | None:
    """The targets of the only output as the training loss took them; None if only the training step can tell them."""
    scored = likelihood.only
    if scored is None or not scored.targets.is_known:
        return None
    try:
        return read_output(scored, mapped(lambda leaf: leaf[0], outputs), batch)
    except (DataError, LookupError, RuntimeError):  # another batch than in training
        return None
