"""Scores of real-valued targets in a test, for any module whose loss or argument states their distribution."""

from __future__ import annotations

from typing import Any, final

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributions import Distribution

from lightning_bayes.callbacks.loss_link import tensors_of
from lightning_bayes.callbacks.sampled_forward import SampledCall
from lightning_bayes.metrics import observed_metrics
from lightning_bayes.predictive import Observation
from lightning_bayes.predictive.nested import mapped
from lightning_bayes.predictive.observations import log_densities, observed
from lightning_bayes.predictive.recipes import cook
from lightning_bayes.predictive.recorded_noise import RecordedNoise


@final
class ObservedMetrics:
    """``test/reg/{RMSE,NLL,coverage,width}`` under the samples of each step's only call of ``self(...)``."""

    def __init__(self, observation: Observation, noise: RecordedNoise | None, interval: float) -> None:
        self.observation, self.noise, self.interval = observation, noise, interval
        self.metrics = observed_metrics("test/")

    def add(self, call: SampledCall, batch: Any) -> None:
        """Score a batch; targets that are not known are left out."""
        targets = targets_of(self.noise, call.outputs, batch)
        if targets is None:
            return
        distribution, samples = distribution_of(self.observation, call.outputs)
        prediction = observed(distribution, samples, self.interval)
        if targets.numel() != prediction.mean.numel():
            return
        targets = targets.reshape(prediction.mean.shape).to(prediction.mean.dtype)
        scores = {"log_densities": log_densities(distribution, samples, targets), "target": targets}
        self.metrics.to(targets.device)
        self.metrics.update(
            mean=prediction.mean,
            variance=prediction.aleatoric + prediction.epistemic,
            lower=prediction.lower,
            upper=prediction.upper,
            **scores,
        )

    def log(self, module: LightningModule) -> None:
        """Log the scores of the test, unless nothing was scored or the module has logged them."""
        if any(metric.update_called for metric in self.metrics.values()):
            logged = module.trainer.callback_metrics
            values = {name: value for name, value in self.metrics.compute().items() if name not in logged}
            module.log_dict(values)


def distribution_of(observation: Observation, outputs: Any) -> tuple[Distribution, int]:
    """The targets' distribution under each sample of outputs ``[S, B, …]``, with batch ``[S · B, …]``, and S."""
    return observation(mapped(lambda leaf: leaf.flatten(0, 1), outputs)), len(tensors_of(outputs)[0])


def targets_of(noise: RecordedNoise | None, outputs: Any, batch: Any) -> Tensor | None:
    """The targets as the training loss took them, else the second entry of a pair."""
    if noise is not None:
        recipe, means = noise.targets, mapped(lambda leaf: leaf.mean(0), outputs)
        value = cook(recipe, tensors_of(means), tensors_of(batch)) if recipe is not None else None
        return value if isinstance(value, Tensor) else None
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    return batch[1] if is_pair and isinstance(batch[1], Tensor) else None
