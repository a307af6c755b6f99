"""Equations of the full covariance, on an optimizer's tensors; `optim.dense.full_gaussian` has them on flat vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.dense.full_gaussian import FullState, damped, sample, update
from lightning_bayes.optim.dense.joint_optimizer import JointEquations, JointUpdate, States
from lightning_bayes.optim.effective import Effective
from lightning_bayes.posteriors import FullGaussian, initial_curvature

_KEY = "joint_curvature"  # in the state of the first parameter


@final
class FullCovariance(JointEquations[Tensor, FullGaussian]):
    """S over all weights, ``[D, D]``, with D = the number of weights in `params`."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = list(params)

    def load(self, states: States) -> Tensor | None:
        """Read S; see `JointEquations.load`."""
        return states[self.params[0]].get(_KEY)

    def store(self, states: States, curvature: Tensor) -> None:
        """Write S; see `JointEquations.store`."""
        states[self.params[0]][_KEY] = curvature

    def initial(self, init_precision: float, effective: Effective) -> Tensor:
        """Return a multiple of I; see `JointEquations.initial`."""
        mean = _flat(self.params)
        return damped(
            mean.new_zeros(len(mean), len(mean)), initial_curvature(init_precision, **effective.start_arguments)
        )

    def build_curvature(self, tensors: list[Tensor]) -> Tensor:
        """Return Ĥ; see `JointEquations.build_curvature`."""
        (measured,) = tensors
        return measured

    def sample(self, curvature: Tensor, noise: list[Tensor], effective: Effective) -> list[Tensor]:
        """Draw weights; see `JointEquations.sample`."""
        mean = _flat(self.params)
        weights = sample(
            FullState(mean, curvature, torch.zeros_like(mean)),
            _flat(noise),
            num_data=effective.num_data,
            prior=effective.prior,
            kl_weight=effective.kl_weight,
            damping=effective.noise_damping,
        )
        return self._parts(weights)

    def update(
        self, old: Tensor, measured: Tensor, momenta: list[Tensor], grads: list[Tensor], **arguments: Any
    ) -> JointUpdate[Tensor]:
        """Call `full_gaussian.update`; see `JointEquations.update`."""
        state = FullState(_flat(self.params), old, _flat(momenta))
        new = update(state, _flat(grads), measured, **arguments)
        return JointUpdate(self._parts(new.mean), self._parts(new.momentum), new.curvature)

    def posterior(
        self, curvature: Tensor, names: dict[nn.Parameter, str], shared: dict[str, Any], effective: Effective
    ) -> FullGaussian:
        """Precision (Ñ/τ)(S + (δ̃ [+ γ]) I); see `JointEquations.posterior`."""
        precision = damped(curvature, effective.noise_damping + effective.prior) * effective.scale
        return FullGaussian(precision=precision, **shared)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [param.numel() for param in self.params])
        return [part.view_as(param) for part, param in zip(parts, self.params, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
