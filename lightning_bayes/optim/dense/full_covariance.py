"""The full-covariance family in an optimizer: flattened weights between its state and `optim.dense.full_gaussian`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.dense.full_gaussian import FullState, sample, update
from lightning_bayes.optim.dense.joint_optimizer import JointFamily, Moved, States
from lightning_bayes.optim.hyperparameters import Hyperparameters
from lightning_bayes.posteriors import FullGaussian, initial_curvature

_KEY = "joint_curvature"  # in the state of the first parameter


@final
class FullCovariance(JointFamily[Tensor, FullGaussian]):
    """S over all weights, ``[D, D]``.

    Args:
        params: The parameters.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = list(params)

    def kept(self, states: States) -> Tensor | None:
        """S; see `JointFamily.kept`."""
        return states[self.params[0]].get(_KEY)

    def keep(self, states: States, curvature: Tensor) -> None:
        """Write S; see `JointFamily.keep`."""
        states[self.params[0]][_KEY] = curvature

    def start(self, hyper: Hyperparameters) -> Tensor:
        """A multiple of I; see `JointFamily.start`."""
        start = initial_curvature(hyper.init_precision or 0.0, **hyper.effective().start_arguments)
        mean = _flat(self.params)
        return start * torch.eye(len(mean), dtype=mean.dtype, device=mean.device)

    def measured(self, tensors: list[Tensor]) -> Tensor:
        """Ĥ; see `JointFamily.measured`."""
        (measured,) = tensors
        return measured

    def sample(self, curvature: Tensor, noise: list[Tensor], hyper: Hyperparameters) -> list[Tensor]:
        """Draw weights; see `JointFamily.sample`."""
        now, mean = hyper.effective(), _flat(self.params)
        drawn = sample(
            FullState(mean, curvature, torch.zeros_like(mean)),
            _flat(noise),
            num_data=now.num_data,
            prior=now.prior,
            kl_weight=now.kl_weight,
            damping=now.noise_damping,
        )
        return self._parts(drawn)

    def update(
        self, old: Tensor, measured: Tensor, momenta: list[Tensor], grads: list[Tensor], hyper: Hyperparameters
    ) -> Moved[Tensor]:
        """Call `full_gaussian.update`; see `JointFamily.update`."""
        now = hyper.effective()
        new = update(
            FullState(_flat(self.params), old, _flat(momenta)),
            _flat(grads),
            measured,
            lr=hyper.lr,
            betas=hyper.betas,
            prior=now.prior,
            damping=now.damping,
            step=hyper.step + 1,
        )
        return Moved(self._parts(new.mean), self._parts(new.momentum), new.curvature)

    def posterior(
        self, curvature: Tensor, names: dict[nn.Parameter, str], shared: dict[str, Any], hyper: Hyperparameters
    ) -> FullGaussian:
        """(Ñ/τ)(S + (δ̃ [+ γ]) I); see `JointFamily.posterior`."""
        now = hyper.effective()
        identity = torch.eye(len(curvature), dtype=curvature.dtype, device=curvature.device)
        shift = now.noise_damping + now.prior
        return FullGaussian(precision=(curvature + shift * identity) * now.scale, **shared)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [param.numel() for param in self.params])
        return [part.view_as(param) for part, param in zip(parts, self.params, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
