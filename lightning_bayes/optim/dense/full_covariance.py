"""Equations of the full covariance, on an optimizer's tensors; `optim.dense.full_gaussian` has them on flat vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.dense.full_gaussian import FullState, damped, sample, update
from lightning_bayes.optim.dense.joint_optimizer import JointEquations, JointState
from lightning_bayes.optim.effective import Effective
from lightning_bayes.posteriors import FullGaussian, initial_curvature


@final
class FullCovariance(JointEquations[FullGaussian]):
    """S over all weights, ``[D, D]``, with D = the number of weights in `params`."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = list(params)
        self.places = [(self.params[0], "joint_curvature")]

    def initial(self, init_precision: float, effective: Effective) -> list[Tensor]:
        """Return a multiple of I; see `JointEquations.initial`."""
        mean = _flat(self.params)
        zero = mean.new_zeros(len(mean), len(mean))
        return [damped(zero, initial_curvature(init_precision, **effective.start_arguments))]

    def sample(self, curvature: list[Tensor], noise: list[Tensor], effective: Effective) -> list[Tensor]:
        """Draw weights; see `JointEquations.sample`."""
        mean, (matrix,) = _flat(self.params), curvature
        weights = sample(
            FullState(mean, matrix, torch.zeros_like(mean)),
            _flat(noise),
            num_data=effective.num_data,
            prior=effective.prior,
            kl_weight=effective.kl_weight,
            damping=effective.noise_damping,
        )
        return self._parts(weights)

    def update(self, state: JointState, grads: list[Tensor], measured: list[Tensor], **arguments: Any) -> JointState:
        """Call `full_gaussian.update`; see `JointEquations.update`."""
        (matrix,), (new_matrix,) = state.curvature, measured
        old = FullState(_flat(state.means), matrix, _flat(state.momenta))
        new = update(old, _flat(grads), new_matrix, **arguments)
        return JointState(self._parts(new.mean), self._parts(new.momentum), [new.curvature])

    def posterior(
        self, curvature: list[Tensor], names: dict[nn.Parameter, str], shared: dict[str, Any], effective: Effective
    ) -> FullGaussian:
        """Precision (Ñ/τ)(S + (δ̃ [+ γ]) I); see `JointEquations.posterior`."""
        (matrix,) = curvature
        precision = damped(matrix, effective.noise_damping + effective.prior) * effective.scale
        return FullGaussian(precision=precision, **shared)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [param.numel() for param in self.params])
        return [part.view_as(param) for part, param in zip(parts, self.params, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
