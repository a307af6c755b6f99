"""The methods of the logistic regressions: the package's pure updates, with all runs in one tensor.

    θ = μ + ε / √(N (s + δ̃))            K samples per run
    (ĝ, ĥ) measured on a minibatch       update(state, ĝ, ĥ)

All runs take the same minibatches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from benchmarks.papers.logistic.model import Runs
from lightning_bayes.optim.diagonal import bbb, vadam, vogn, von, vprop
from lightning_bayes.optim.diagonal.state import MeanFieldState

Measured: TypeAlias = Literal["squares", "square of the mean", "hessian", "reparameterised"]


class Method(NamedTuple):
    """One curve or column."""

    title: str
    update: Callable[..., Any]
    measured: Measured
    state_type: Any = MeanFieldState
    samples: int = 1
    options: Mapping[str, Any] = MappingProxyType({})
    scale: Callable[[int], float] = lambda num_data: 1.0
    has_prior: bool = True
    start: float = 0.1


_SUM = {"scaling": "sum"}
METHODS = {
    "vogn-1": Method("VOGN-1", vogn.update, "squares"),
    "vadam": Method("Vadam", vadam.update, "square of the mean"),
    "vprop-2": Method("Vprop-2", vprop.update, "square of the mean", samples=2, options=_SUM, scale=float),
    "vprop-0": Method("Vprop-0", vprop.update, "square of the mean", samples=0, options=_SUM, scale=float),
    "cvi": Method("CVI, 10 samples", von.update, "hessian", samples=10),
    "bbb": Method("BBB (Adam)", bbb.update, "reparameterised", bbb.BBBState),
    # Vprop's mean form without a prior is RMSprop, with the damping as ε.
    "rmsprop": Method(
        "RMSprop", vprop.update, "square of the mean", samples=0, options={"damping": 1e-8}, has_prior=False, start=0.0
    ),
}


class Rates(NamedTuple):
    """Learning rates that fall geometrically from the first to the last update."""

    lr: tuple[float, float]
    beta: tuple[float, float]
    momentum: float = 0.0

    def at(self, progress: float) -> dict[str, Any]:
        """Arguments of an update after a fraction `progress` of all updates."""
        lr, beta = (start * (end / start) ** progress for start, end in (self.lr, self.beta))
        return {"lr": lr, "betas": (self.momentum, 1 - beta)}


def train(
    method: Method, data: Runs, *, updates: int, batch: int | None, rates: Rates, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield mean and precision ``[R, D]`` of all runs after each update."""
    # Every method with noise starts at μ = 0 with precision δ + N/10: the first noise is narrower than a weak prior.
    generator = torch.Generator().manual_seed(seed)
    n, prior = data.num_data, data.prior_precision / data.num_data if method.has_prior else 0.0
    mean = torch.zeros(len(data.train_x), data.train_x.shape[2])
    momenta = [torch.zeros_like(mean) for _ in method.state_type._fields[2:]]
    state = method.state_type(mean, torch.full_like(mean, method.start), *momenta)
    batches = _batches(data, batch, generator)
    for t in range(updates):
        std = (n * (state.curvature + prior)).rsqrt() if method.samples else None
        grad, measured = _measure(method, *next(batches), state.mean, std, generator)
        arguments = {**rates.at(t / updates), **method.options}
        state = method.update(state, grad, method.scale(n) * measured, prior=prior, step=t + 1, **arguments)
        yield state.mean, n * (state.curvature + prior)


def _batches(data: Runs, batch: int | None, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    if batch is None:
        while True:
            yield data.train_x, data.train_y
    runs, n = data.train_y.shape
    rows = torch.arange(runs)[:, None]
    while True:
        order = torch.rand(runs, n, generator=generator).argsort(1)
        for start in range(0, n - batch + 1, batch):
            chosen = order[:, start : start + batch]
            yield data.train_x[rows, chosen], data.train_y[rows, chosen]


def _measure(
    method: Method, x: Tensor, y: Tensor, mean: Tensor, std: Tensor | None, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """ĝ and ĥ, averaged over the samples."""
    if std is None:
        return _at(method.measured, x, y, mean, None)
    pairs = []
    for _ in range(method.samples):
        noise = torch.randn(mean.shape, generator=generator)
        pairs.append(_at(method.measured, x, y, mean + std * noise, noise / std))
    grads, measured = zip(*pairs, strict=True)
    return sum(grads) / len(pairs), sum(measured) / len(pairs)


def _at(measured: Measured, x: Tensor, y: Tensor, theta: Tensor, score: Tensor | None) -> tuple[Tensor, Tensor]:
    """ĝ and ĥ at θ; `score` is ε/σ."""
    p = torch.bmm(x, theta[..., None])[..., 0].sigmoid()
    residual = p - y
    grad = _mean_over_examples(residual, x)
    if measured == "square of the mean":
        return grad, grad.square()
    if measured == "reparameterised":
        assert score is not None
        return grad, grad * score
    weight = residual.square() if measured == "squares" else p * (1 - p)
    return grad, _mean_over_examples(weight, x.square())


def _mean_over_examples(weight: Tensor, x: Tensor) -> Tensor:
    return torch.bmm(weight[:, None], x)[:, 0] / x.shape[1]


def last(states: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The final mean and precision."""
    (final,) = deque(states, maxlen=1)
    return final


def checkpoints(updates: int, count: int = 30) -> set[int]:
    """Update counts from 1, evenly spaced on a logarithmic axis."""
    return {round(math.exp(math.log(updates) * k / (count - 1))) for k in range(count)}
