"""Scores of real-valued targets in a test, for any module whose loss or argument states their distribution."""

from __future__ import annotations

from typing import Any, final

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_bayes.callbacks.loss_link import tensors_of
from lightning_bayes.callbacks.sampled_forward import SampledForward
from lightning_bayes.metrics import observed_metrics
from lightning_bayes.predictive.observations import log_densities, observed
from lightning_bayes.predictive.recipes import cook
from lightning_bayes.predictive.recorded_noise import RecordedNoise


@final
class ObservedMetrics:
    """``test/reg/{RMSE,NLL,coverage,width}`` under the samples of each step's only call of ``self(...)``."""

    def __init__(self, noise: RecordedNoise | None) -> None:
        self.noise, self.calls = noise, 0
        self.metrics = observed_metrics("test/")

    def add(self, forward: SampledForward, batch: Any) -> None:
        """Score a batch; steps with several calls, and targets that are not known, are left out."""
        calls, self.calls = forward.calls - self.calls, forward.calls
        found, targets = forward.distribution(), targets_of(self.noise, forward, batch)
        if calls != 1 or found is None or targets is None:
            return
        distribution, samples = found
        prediction = observed(distribution, samples, forward.interval)
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


def targets_of(noise: RecordedNoise | None, forward: SampledForward, batch: Any) -> Tensor | None:
    """The targets as the training loss took them, else the second entry of a pair."""
    if noise is not None:
        recipe = noise.targets
        value = cook(recipe, tensors_of(forward.mean_output()), tensors_of(batch)) if recipe is not None else None
        return value if isinstance(value, Tensor) else None
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    return batch[1] if is_pair and isinstance(batch[1], torch.Tensor) else None
