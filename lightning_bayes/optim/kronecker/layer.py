"""A layer with Kronecker factors: its measurements, inversions, samples and moves.

Its tensors and numbers are in the optimizer's state of the layer's weight, so that they can be moved, saved and loaded:

    momentum                        m, shaped like the weight; the bias's part is in the state of the bias
    output_factor, input_factor     S and A
    output_inverse, input_inverse   S⁻ and A⁻ as of the last inversion
    output_root, input_root         R_S and R_A of the noise as of the last inversion
    scale, damping                  of the noise, see `optim.covariance.kronecker`
    measurements                    number of measurements of the factors
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.covariance import kronecker as covariance
from lightning_bayes.optim.covariance.diagonal import is_noisy
from lightning_bayes.optim.covariance.kronecker import layer_damping, layer_product
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.kronecker import equations
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer, factors_at_precision
from lightning_bayes.optim.kronecker.moves import Move
from lightning_bayes.optim.measuring import weight_of_old
from lightning_bayes.optim.noise import CounterNoise
from lightning_bayes.optim.weight_prior import prior_means

if TYPE_CHECKING:
    from lightning_bayes.optim.variational import VariationalOptimizer


@final
class KroneckerLayer:
    """A layer whose curvature is a Kronecker product."""

    def __init__(self, matrix: MatrixLayer, optimizer: VariationalOptimizer) -> None:
        self.matrix, self._optimizer = matrix, optimizer
        self._kept: tuple[tuple[int, ...], Tensor] | None = None  # U of the antithetic twin, with its counter

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state of the weight."""
        state: dict[str, Any] = self._optimizer.state[self.matrix.weight]
        return state

    @property
    def is_noisy(self) -> bool:
        """Whether the layer is sampled."""
        return is_noisy(self.matrix.group, self.state)

    @property
    def is_of_another_shape(self) -> bool:
        """Whether the factors predate freezing or unfreezing the bias, which changes the matrix."""
        factor = self.state.get("input_factor")
        return factor is not None and factor.shape[-1] != self.matrix.shape[-1]

    # -- curvature ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Discard factors of another shape; a noisy layer without factors starts at its group's ``init_precision``."""
        if self.is_of_another_shape:
            for key in [key for key in self.state if key.startswith(("output_", "input_"))]:
                del self.state[key]
            self.state["measurements"] = 0
        precision = self.matrix.group["posterior"]["init_precision"]
        if precision is not None and self.is_noisy and "output_factor" not in self.state:
            factors = factors_at_precision(self.matrix, precision, effective(self.matrix.group))
            self.store({**entries(factors, "factor"), **self.inverted(factors)})

    def renewed(self, measured: KroneckerProduct | None, *, is_due: bool) -> dict[str, Any]:
        """The entries of the state after a measurement, if any, and an inversion, if it `is_due`; changes nothing."""
        new: dict[str, Any] = {}
        if measured is not None:
            count = self.state["measurements"] + 1
            new = {**entries(self._averaged(measured, count), "factor"), "measurements": count}
            is_due |= count & (count - 1) == 0  # after 1, 2, 4, 8, …, because averages of few batches change fast
        return {**new, **self.inverted(layer_product({**self.state, **new}, "factor"))} if is_due else new

    def _averaged(self, measured: KroneckerProduct, count: int) -> KroneckerProduct:
        """The running averages of S and A, including the measurement number `count`."""
        if "output_factor" not in self.state:
            return measured  # the first measurement starts the average
        settings = self.matrix.group["posterior"]
        starts_as_mean = not self._optimizer.steps[settings["step_rule"]].is_published
        beta = weight_of_old(settings["betas"][1], count, 1, starts_as_mean=starts_as_mean)
        return equations.average_factors(layer_product(self.state, "factor"), measured, beta=beta)

    def inverted(self, factors: KroneckerProduct) -> dict[str, Any]:
        """The entries of the inverted S ⊗ A, for the step and the noise; may raise `NotPositiveDefiniteError`."""
        hyper, name, inverted = effective(self.matrix.group), self.matrix.name, dict[str, Any]()
        if self._optimizer.base_step is None:
            inverted = entries(equations.damped_inverse(factors, hyper.prior + hyper.damping, name), "inverse")
        if self.is_noisy:
            damping = layer_damping(factors, hyper)
            inverted |= {**entries(equations.noise_root(factors, damping, name), "root"), "damping": damping}
        return inverted

    def store(self, new: Mapping[str, Any]) -> None:
        """Store what `renewed` returned, in the state of the weight, and the scale of new noise."""
        self.state.update(new)
        for param in self.matrix.params:
            state = self._optimizer.state[param]
            state["measurements"] = self.state["measurements"]
            state.pop("curvature", None)  # squared gradients from before the parameter was part of a matrix
        if "damping" in new:
            self._kept = None
            self.refresh()

    # -- noise --------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Store the scale of the noise of a layer that was inverted."""
        if self.is_noisy and "output_root" in self.state:
            covariance.refresh(self.matrix.group, self.state, self.matrix.weight.detach())

    def sample(self, noise: CounterNoise) -> dict[nn.Parameter, Tensor]:
        """Draw a sample of the parameters, W = M ± U / √scale; empty without noise, or before the first inversion."""
        matrix, state = self.matrix, self.state
        if not (self.is_noisy and "output_root" in state):
            return {}
        factor = noise.sign * state["scale"] ** -0.5
        samples = [
            torch.add(mean.detach(), part, alpha=factor)
            for mean, part in zip(matrix.params, matrix.split(self._transformed_draw(noise)), strict=True)
        ]
        return dict(zip(matrix.params, samples, strict=True))

    def _transformed_draw(self, noise: CounterNoise) -> Tensor:
        """U = R_S E R_Aᵀ without its sign; kept for the antithetic twin if an update draws one sample."""
        counter, kept = noise.counter, self._kept
        self._kept = None
        if kept is not None and kept[0] == counter:
            noise.skip()
            return kept[1]
        draws = [torch.empty_like(param, requires_grad=False) for param in self.matrix.params]
        noise.draw_(draws)
        transformed = layer_product(self.state, "root").upper_matvec(self.matrix.join(draws))
        if noise.has_twin and self._optimizer.mc_samples == 1:
            self._kept = counter, transformed
        return transformed

    # -- the update ---------------------------------------------------------------------------------------------------

    def count_update(self) -> list[dict[str, Any]]:
        """Count an update in the states of the parameters, and return the states."""
        states = [self._optimizer.state[param] for param in self.matrix.params]
        for state in states:
            state["step"] += 1
        return states

    def moves(self, summed: float) -> list[Move]:
        """Update the momentum, and compute a move of each parameter."""
        matrix, states = self.matrix, self.count_update()
        distance = matrix.join(matrix.params).detach()  # from the prior's mean
        if centres := prior_means(states):
            distance = distance - matrix.join(centres)
        momentum = matrix.join([state["momentum"] for state in states])
        step = equations.update(
            equations.KFACState(distance, momentum, layer_product(states[0], "inverse")),
            matrix.join([param.grad for param in matrix.params if param.grad is not None]),
            beta=matrix.group["posterior"]["betas"][0],
            prior=effective(matrix.group).prior,
            step=states[0]["step"],
        )
        for state, part in zip(states, matrix.split(step.momentum), strict=True):
            state["momentum"] = part
        directions, norms = matrix.split(step.direction), matrix.split(step.direction * step.corrected)
        return [
            Move([param], [state], group, summed, [direction.neg()], norm.sum())
            for param, state, group, direction, norm in zip(
                matrix.params, states, matrix.groups, directions, norms, strict=True
            )
        ]


def entries(value: KroneckerProduct, kind: str) -> dict[str, Tensor]:
    """Return the entries of a state in which the product of a kind has this value."""
    return {f"{side}_{kind}": factor for side, factor in zip(("output", "input"), value, strict=True)}
