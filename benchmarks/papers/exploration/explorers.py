"""The six methods of Khan et al. 2018, Figs. 3, 5 and 6: sampling and updates of an actor's weights.

Each method holds the actors of all seeds as flat weights ``[R, P]`` and uses the package's pure updates. A weight sample θ
acts and gives the gradient of the same time step; tests and target networks use the mean. ĝ is the gradient of the *mean*
over a batch of M. The authors' code uses the sum G = Mĝ; with N = M² both are equivalent for Vadam and VadaGrad:

    Vadam           1/σ² = N (s + δ̃) + c        c = 1/`MAX_NOISE`², only in the noise
    VadaGrad        1/σ² = N (s + δ̃)            initially 1e4
    SGD, Adam       no noise
    exploring SGD, exploring Adam       θ = μ + ε/√P with ∂/∂P = -½ ε P^(-3/2) G and learning rate 0.01 for P, initially 1e4

∂θ/∂P is 5e-7 at this P, so the exploring baselines keep σ = 0.01.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from benchmarks.papers.exploration.setting import BATCH, MAX_NOISE, NUM_DATA, START_PRECISION
from lightning_bayes.optim.diagonal import vadagrad, vadam
from lightning_bayes.optim.diagonal.state import MeanFieldState

LR: Final = 1e-4
VADAGRAD_LR: Final = 1e-2
PRECISION_LR: Final = 1e-2
BETAS: Final = (0.9, 0.999)
VADAGRAD_BETAS: Final = (0.0, 0.99)
PRIOR: Final = 1e-8 / NUM_DATA  # δ̃
_EPSILON: Final = 1e-8  # ε of Adam


class Explorer(ABC):
    """The actors of all seeds, trained with one method.

    Args:
        mean: Initial weights, ``[R, P]``.

    Attributes:
        mean: μ, ``[R, P]``.
        steps: Number of updates so far.
    """

    def __init__(self, mean: Tensor) -> None:
        self.mean, self.steps = mean, 0

    @abstractmethod
    def precision(self) -> Tensor | None:
        """1/σ² of the next sample, ``[R, P]``; None for no noise."""

    def draw(self, epsilon: Tensor) -> Tensor:
        """θ = μ + σε."""
        precision = self.precision()
        return self.mean if precision is None else torch.addcmul(self.mean, epsilon, precision.rsqrt())

    def update(self, grad: Tensor, epsilon: Tensor) -> None:
        """Update with the mean gradient of a batch at the sample from `epsilon`."""
        self.steps += 1
        self.move(grad, epsilon)

    @abstractmethod
    def move(self, grad: Tensor, epsilon: Tensor) -> None:
        """The update itself; `update` counts it."""


def _adam(state: MeanFieldState, grad: Tensor, lr: float, step: int) -> MeanFieldState:
    """A step of Adam: Vadam without noise and prior."""
    return vadam.update(
        state, grad, grad.square(), lr=lr, betas=BETAS, prior=0.0, damping=_EPSILON, step=step, from_zero=True
    )


def _start(mean: Tensor, curvature: float = 0.0) -> MeanFieldState:
    return MeanFieldState(mean, torch.full_like(mean, curvature), torch.zeros_like(mean))


@final
class VadamExplorer(Explorer):
    """Vadam."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__(mean)
        self.state = _start(mean)

    def precision(self) -> Tensor:
        """N (s + δ̃) + c."""
        return (self.state.curvature + PRIOR).mul_(NUM_DATA).add_(MAX_NOISE**-2)

    def move(self, grad: Tensor, epsilon: Tensor) -> None:
        """See `optim.diagonal.vadam`."""
        common = {"lr": LR, "betas": BETAS, "prior": PRIOR, "step": self.steps, "from_zero": True}
        self.state = vadam.update(self.state, grad, grad.square(), **common)
        self.mean = self.state.mean


@final
class VadaGradExplorer(Explorer):
    """VadaGrad, at temperature 0."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__(mean)
        self.state = _start(mean, START_PRECISION / NUM_DATA - PRIOR)

    def precision(self) -> Tensor:
        """N (s + δ̃)."""
        return (self.state.curvature + PRIOR).mul_(NUM_DATA)

    def move(self, grad: Tensor, epsilon: Tensor) -> None:
        """See `optim.diagonal.vadagrad`."""
        common = {"lr": VADAGRAD_LR, "betas": VADAGRAD_BETAS, "prior": 0.0, "step": self.steps}
        self.state = vadagrad.update(self.state, grad, grad.square(), **common, temperature=0.0, full_prior=PRIOR)
        self.mean = self.state.mean


@final
class PlainSGD(Explorer):
    """SGD on the sum over a batch."""

    def precision(self) -> None:
        """No noise."""

    def move(self, grad: Tensor, epsilon: Tensor) -> None:
        """μ ← μ - α G."""
        self.mean = self.mean - LR * BATCH * grad


@final
class PlainAdam(Explorer):
    """Adam."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__(mean)
        self.state = _start(mean)

    def precision(self) -> None:
        """No noise."""

    def move(self, grad: Tensor, epsilon: Tensor) -> None:
        """One step of Adam."""
        self.state = _adam(self.state, grad, LR, self.steps)
        self.mean = self.state.mean


@final
class ExploringSGD(Explorer):
    """SGD on mean and precision."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__(mean)
        self._precision = torch.full_like(mean, START_PRECISION)

    def precision(self) -> Tensor:
        """P."""
        return self._precision

    def move(self, grad: Tensor, epsilon: Tensor) -> None:
        """Update mean and precision with SGD."""
        of_precision = precision_gradient(grad, epsilon, self._precision)
        self.mean = self.mean - LR * BATCH * grad
        self._precision = self._precision - PRECISION_LR * of_precision


@final
class ExploringAdam(Explorer):
    """Adam on mean and precision."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__(mean)
        self.state, self.of_precision = _start(mean), _start(torch.full_like(mean, START_PRECISION))

    def precision(self) -> Tensor:
        """P."""
        return self.of_precision.mean

    def move(self, grad: Tensor, epsilon: Tensor) -> None:
        """Update mean and precision with Adam."""
        of_precision = precision_gradient(grad, epsilon, self.precision())
        self.state = _adam(self.state, grad, LR, self.steps)
        self.of_precision = _adam(self.of_precision, of_precision, PRECISION_LR, self.steps)
        self.mean = self.state.mean


def precision_gradient(grad: Tensor, epsilon: Tensor, precision: Tensor) -> Tensor:
    """∂/∂P of the batch's summed loss at θ = μ + ε/√P: -½ ε P^(-3/2) G, from the gradient ĝ of the mean at θ."""
    return -0.5 * BATCH * grad * epsilon * precision.pow(-1.5)


@dataclass(frozen=True)
class Method:
    """A method's title in tables, and its class."""

    title: str
    explorer: Callable[[Tensor], Explorer]


METHODS: Final = {
    "vadam": Method("Vadam", VadamExplorer),
    "vadagrad": Method("VadaGrad", VadaGradExplorer),
    "sgd_plain": Method("SGD, plain", PlainSGD),
    "sgd_explore": Method("SGD, exploring", ExploringSGD),
    "adam_plain": Method("Adam, plain", PlainAdam),
    "adam_explore": Method("Adam, exploring", ExploringAdam),
}
