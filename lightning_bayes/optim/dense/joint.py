"""What optimizers of small models share whose posterior joins all weights: one prior, one step, curvature over all of them.

They serve plain PyTorch, as `VOGN` does: ``with opt.sampled_params(): loss.backward()``, then ``opt.step()``. The first pass
is free of noise, unless ``init_precision`` says with which noise to begin, and the curvature starts with what it measures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import AbstractEngine, Capture
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim.hyperparameters import Effective, Hyperparameters, effective
from lightning_bayes.optim.runtime.base import NoisyOptimizer
from lightning_bayes.optim.runtime.noise import CounterNoise
from lightning_bayes.optim.runtime.parameters import require_sizes
from lightning_bayes.optim.runtime.passes import Curvature, FinishedPass
from lightning_bayes.optim.settings import plain


class JointOptimizer(NoisyOptimizer, ABC):
    """Base of the family.

    Args:
        model: The model, all of whose trainable parameters are taken.
        engine: Measures the passes.
        params: These parameters, in the order of the curvature.
        lr: α.
        betas: (β₁, β₂), weights of the old momentum and the old curvature.
        num_data: N. Required before the first update.
        prior_precision: δ of the prior N(0, 1/δ).
        kl_weight: τ, above 0: below 1 is a cold posterior, above 1 a warm one.
        data_augmentation_factor: ρ.
        damping: γ.
        damping_in_noise: Whether γ counts in the noise and the posterior precision.
        init_precision: Posterior precision before the first update; None takes the first batch's curvature.
        mc_samples: K, weight samples per ``step(closure)``.
        seed: Seed of the noise.
        max_nonfinite_steps: Updates in a row that may be skipped for a measurement that is not finite.
    """

    joins_weights = True

    def __init__(
        self,
        model: nn.Module,
        engine: AbstractEngine,
        params: Sequence[nn.Parameter],
        *,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        num_data: int | None = None,
        prior_precision: float = 1.0,
        kl_weight: float = 1.0,
        data_augmentation_factor: float = 1.0,
        damping: float = 0.0,
        damping_in_noise: bool = False,
        init_precision: float | None = None,
        mc_samples: int = 1,
        seed: int = 0,
        max_nonfinite_steps: int = 10,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "num_data": num_data,
            "prior_precision": prior_precision,
            "kl_weight": kl_weight,
            "kl_warmup_steps": 0,
            "kl_warmup_init": 1.0,
            "data_augmentation_factor": data_augmentation_factor,
            "damping": damping,
            "damping_in_noise": damping_in_noise,
            "init_precision": init_precision,
            "noise_seed": seed,
            "step": 0,
        }
        counts = {"mc_samples": mc_samples, "max_nonfinite_steps": max_nonfinite_steps, "seed": seed}
        Hyperparameters.check({**defaults, **counts}, complete=True)
        require_sizes(model)
        super().__init__(
            model, engine, params, plain(defaults), mc_samples=mc_samples, max_nonfinite_steps=max_nonfinite_steps
        )

    @abstractmethod
    def _moments(self, finished: FinishedPass) -> list[Tensor]:
        """The curvature of a finished pass, as means over its examples."""

    @abstractmethod
    def _has_curvature(self) -> bool:
        """Whether there is a curvature, so that passes have noise; starts it where ``init_precision`` says it."""

    @abstractmethod
    def _draw(self, noise: list[Tensor]) -> list[Tensor]:
        """Turn standard normal noise, shaped like the parameters, into a posterior sample of them."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the one group there is; see `torch.optim.Optimizer`.

        Args:
            param_group: The group.

        Raises:
            UnsupportedTrainingError: If there is one already: the posterior joins all weights of one group.
        """
        if self.param_groups:
            raise UnsupportedTrainingError(
                f"{type(self).__name__} joins all weights under one set of hyperparameters, so it has one parameter group. "
                "Freeze what should not be learned with requires_grad_(False) before the optimizer is built."
            )
        super().add_param_group(param_group)

    def _open_capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        self._require_unfrozen()
        return super()._open_capture(sample, loss_scale)

    def _require_unfrozen(self) -> None:
        frozen = [name for name, p in self.model.named_parameters() if p in set(self._params) and not p.requires_grad]
        if frozen:
            raise UnsupportedTrainingError(
                f"{type(self).__name__} joins all weights that were trainable when it was built, and these no longer are: "
                f"{', '.join(frozen)}. Freeze parameters before the optimizer is built."
            )

    @property
    def _group(self) -> dict[str, Any]:
        return self.param_groups[0]

    @property
    def _params(self) -> list[nn.Parameter]:
        params: list[nn.Parameter] = self._group["params"]
        return params

    def _effective(self) -> Effective:
        """Ñ, τ, δ̃ and γ now; a `HyperparameterError` if N is not known."""
        return effective(self._group)

    def _sample(self, noise: CounterNoise) -> dict[nn.Parameter, Tensor]:
        if not self._has_curvature():
            return {}
        draws = [torch.empty_like(param, requires_grad=False) for param in self._params]
        noise.fill_(draws)
        torch._foreach_copy_(draws, self._draw(draws))
        return dict(zip(self._params, draws, strict=True))

    def _read_pass(self, finished: FinishedPass) -> Curvature:
        return dict(enumerate(self._moments(finished)))

    def _finalise_curvature(self, curvature: Curvature) -> Curvature:
        return dict(curvature)

    def _move_to(self, means: Sequence[Tensor], momenta: Sequence[Tensor]) -> None:
        """Write the new state, and count the update."""
        for param, mean, momentum in zip(self._params, means, momenta, strict=True):
            param.copy_(mean)
            self.state[param]["momentum"] = momentum.clone()
        self._group["step"] += 1

    def _momentum(self, param: nn.Parameter) -> Tensor:
        momentum = self.state[param].get("momentum")
        return torch.zeros_like(param) if momentum is None else momentum

    def _constants(self) -> dict[str, Tensor]:
        """Parameters without noise and buffers by name."""
        mine = {name for name, param in self.model.named_parameters() if param in set(self._params)}
        state = self.model.state_dict()
        return {n: v.detach().clone() for n, v in state.items() if n not in mine and isinstance(v, Tensor)}
