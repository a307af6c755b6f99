"""The gradient magnitude ĥ = ĝ² in place of a Hessian: what it measures, and where its posterior is known to be wrong.

RMSprop and Adam take the square of the minibatch's mean gradient for curvature, and so do Vprop, Vadam, VadaGrad and Noisy
Adam. Over minibatches of M of N examples its expectation is (Khan et al. 2018, Theorem 1, https://arxiv.org/abs/1806.04854)

    E[ĝ²] = w · mean_i g_i² + (1-w) · g²        w = (N-M) / (M (N-1)),  g = mean_i g_i

**The posterior therefore depends on the batch size.** M = 1 measures the empirical Fisher's diagonal, as VOGN does; a larger
M measures about 1/M of it, so the noise is about √M times as large; M = N measures the gradient's own square, which says
nothing of the curvature and leaves about the prior. M is the number of examples under one weight sample.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from lightning_bayes.optim.diagonal.estimators import BatchSquare
from lightning_bayes.optim.diagonal.mean_field import MeanFieldOptimizer
from lightning_bayes.optim.runtime.passes import Measurement


class GradientMagnitudeOptimizer(MeanFieldOptimizer):
    """A mean-field optimizer whose ĥ is ĝ²; it warns once where that cannot be a curvature."""

    estimator = BatchSquare()

    def __init__(self, model: nn.Module, *arguments: Any, **named: Any) -> None:
        self._warned = False
        super().__init__(model, *arguments, **named)

    @torch.no_grad()
    def _update_all(self, measurement: Measurement) -> None:
        super()._update_all(measurement)
        group = self.param_groups[0]
        if self._warned or not group["noisy"] or self.num_updates == 1:  # a dry run of one batch means nothing
            return
        text = self._warning_text(measurement.num_examples / measurement.num_samples, group)
        if text:
            self._warned = True
            warnings.warn(text, stacklevel=3)

    def _warning_text(self, batch_size: float, group: dict[str, Any]) -> str:
        """What is wrong with a posterior from batches of `batch_size` examples; empty if nothing is."""
        if batch_size < group["num_data"] or group["num_data"] == 1:
            return ""
        return (
            f"{type(self).__name__} takes the squared gradient of a batch for its curvature, and the batch holds all "
            f"{group['num_data']} examples: near an optimum that is zero, whatever the curvature, so the posterior is about "
            "as wide as the prior. Use smaller batches, or VOGN."
        )
