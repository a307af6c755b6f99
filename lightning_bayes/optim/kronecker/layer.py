"""A layer with Kronecker factors: its measurements, inversions, samples and moves.

Its tensors and numbers are in the optimizer's state of the layer's weight, so that they can be moved, saved and loaded:

    momentum                        m, shaped like the weight; the bias's part is in the state of the bias
    output_factor, input_factor     S and A
    output_inverse, input_inverse   S⁻ and A⁻ as of the last inversion
    output_root, input_root         R_S and R_A of the noise as of the last inversion
    measurements                    number of measurements of the factors
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.kronecker import equations
from lightning_bayes.optim.kronecker.layer_noise import POOL_PAIRS, LayerNoise
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer, factors_at_precision
from lightning_bayes.optim.kronecker.moves import Move
from lightning_bayes.optim.readout.layer import layer_damping, layer_product, layer_scale
from lightning_bayes.optim.readout.noise_terms import is_noisy
from lightning_bayes.optim.runtime.measuring import weight_of_old
from lightning_bayes.optim.runtime.noise import CounterNoise
from lightning_bayes.optim.weight_prior import prior_means

if TYPE_CHECKING:
    from lightning_bayes.optim.variational import VariationalOptimizer


@final
class KroneckerLayer:
    """A layer whose curvature is a Kronecker product.

    Args:
        matrix: The layer's matrix.
        optimizer: The optimizer.
    """

    def __init__(self, matrix: MatrixLayer, optimizer: VariationalOptimizer) -> None:
        self.matrix, self._optimizer = matrix, optimizer
        self._noise: LayerNoise | None = None  # of the last root

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state of the weight."""
        state: dict[str, Any] = self._optimizer.state[self.matrix.weight]
        return state

    @property
    def has_factors(self) -> bool:
        """Whether factors were measured or initialised."""
        return "output_factor" in self.state

    @property
    def is_noisy(self) -> bool:
        """Whether the layer is sampled."""
        return is_noisy(self.matrix.group, self.state)

    @property
    def is_of_another_shape(self) -> bool:
        """Whether the factors predate freezing or unfreezing the bias, which changes the matrix."""
        factor = self.state.get("input_factor")
        return factor is not None and factor.shape[-1] != self.matrix.shape[-1]

    def drop_if_of_another_shape(self) -> None:
        """Discard the factors if they predate freezing or unfreezing the bias."""
        if self.is_of_another_shape:
            for key in [key for key in self.state if key.startswith(("output_", "input_"))]:
                del self.state[key]
            self.state["measurements"] = 0

    # -- curvature ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Initialise and invert the factors if a noisy layer has none and its group has an ``init_precision``."""
        precision = self.matrix.group["posterior"]["init_precision"]
        if precision is not None and self.is_noisy and not self.has_factors:
            factors = factors_at_precision(self.matrix, precision, effective(self.matrix.group))
            inverted = self.invert(factors)
            self.store_factors(factors)
            self.state.update(inverted)

    def average_factors(self, measured: KroneckerProduct) -> KroneckerProduct:
        """Return the running averages of S and A, including a measurement."""
        if not self.has_factors:
            return measured  # the first measurement starts the average
        group, measurements = self.matrix.group, self.state["measurements"] + 1
        starts_as_mean = not self._optimizer.step_of(group).is_published
        beta = weight_of_old(group["posterior"]["betas"][1], measurements, 1, starts_as_mean=starts_as_mean)
        return equations.average_factors(layer_product(self.state, "factor"), measured, beta=beta)

    def store_factors(self, factors: KroneckerProduct) -> None:
        """Store S and A, and drop the squared gradients that the parameters had before they were part of a matrix."""
        self.state.update(entries(factors, "factor"))
        for param in self.matrix.params:
            self._optimizer.state[param].pop("curvature", None)

    def count_measurement(self) -> None:
        """Count a measurement in the states of the parameters."""
        count = self.state["measurements"] + 1
        for param in self.matrix.params:
            self._optimizer.state[param]["measurements"] = count

    def inverted_kinds(self) -> list[str]:
        """The products that an inversion yields: ``"inverse"`` for the step, ``"root"`` for the noise."""
        is_needed = {"inverse": self._optimizer.base_step is None, "root": self.is_noisy}
        return [kind for kind, needed in is_needed.items() if needed]

    def invert(self, factors: KroneckerProduct) -> dict[str, Tensor]:
        """Return the state's entries of the inverted S ⊗ A; raises `NotPositiveDefiniteError` if that fails."""
        hyper, name, inverted = effective(self.matrix.group), self.matrix.name, dict[str, Tensor]()
        kinds = self.inverted_kinds()
        if "inverse" in kinds:
            inverse = equations.damped_inverse(factors, prior=hyper.prior, damping=hyper.damping, name=name)
            inverted |= entries(inverse, "inverse")
        if "root" in kinds:
            damping = layer_damping(factors, hyper)  # includes the prior
            inverted |= entries(equations.noise_root(factors, prior=0.0, damping=damping, name=name), "root")
        return inverted

    # -- noise --------------------------------------------------------------------------------------------------------

    def sample(self, noise: CounterNoise, buffer: Callable[[Tensor], Tensor]) -> dict[nn.Parameter, Tensor]:
        """Draw a sample of the parameters; empty without noise, or before the first inversion.

        Args:
            noise: Noise of the pass.
            buffer: Returns scratch memory for a parameter.

        Returns:
            A sample of each parameter.
        """
        matrix, state = self.matrix, self.state
        if not (is_noisy(matrix.group, state) and "output_root" in state):
            return {}
        values, means = [buffer(param) for param in matrix.params], [param.detach() for param in matrix.params]
        layer_noise = self._noise_of(layer_product(state, "root"))
        scale = layer_scale(layer_noise.mean_variance, state, means[0], effective(matrix.group))
        # Several samples would evict each other from the memory of the pool.
        pool = noise.next_pool(POOL_PAIRS) if self._optimizer.mc_samples == 1 else None
        if pool is None:
            noise.fill_(values)
            weights = equations.sample(matrix.join(means), layer_noise.root, matrix.join(values), num_data=scale)
            torch._foreach_copy_(values, matrix.split(weights))
        else:
            factor = torch.as_tensor(scale, dtype=means[0].dtype, device=means[0].device).rsqrt() * noise.sign
            for value, mean, part in zip(values, means, matrix.split(layer_noise.draw(pool)), strict=True):
                torch.addcmul(mean, part, factor, out=value)  # `equations.sample`, in one pass over the weights
        return dict(zip(matrix.params, values, strict=True))

    def _noise_of(self, root: KroneckerProduct) -> LayerNoise:
        if self._noise is None or not self._noise.is_of(root):
            self._noise = LayerNoise(root)
        return self._noise

    # -- the update ---------------------------------------------------------------------------------------------------

    def count_update(self) -> list[dict[str, Any]]:
        """Count an update in the states of the parameters, and return the states."""
        states = [self._optimizer.state[param] for param in self.matrix.params]
        for state in states:
            state["step"] += 1
        return states

    def moves(self) -> list[Move]:
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
            Move([param], [state], group, [direction.neg()], norm.sum())
            for param, state, group, direction, norm in zip(
                matrix.params, states, matrix.groups, directions, norms, strict=True
            )
        ]


def entries(value: KroneckerProduct, *kinds: str) -> dict[str, Tensor]:
    """Return the entries of a state in which the products `kinds` have this value."""
    return {f"{side}_{kind}": factor for kind in kinds for side, factor in zip(("output", "input"), value, strict=True)}
