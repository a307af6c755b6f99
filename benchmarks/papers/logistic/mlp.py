"""Fig. 3 of the Vprop paper: two hidden layers of ten units on australian and a1a, with the package's optimizers.

The network has two outputs and a softmax instead of one output and a sigmoid, because BackPACK has the Hessian of
cross-entropy only. The ELBO is estimated from posterior samples. All data are in one batch. The rates of the methods with a
bound are those with the lowest bound on one more split and seed, which the table does not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.papers.logistic.model import Runs
from lightning_bayes.errors import NonFiniteError
from lightning_bayes.optim import BBB, CVI, VariationalOptimizer, Vprop, Vprop0

PRIOR_PRECISION = 1.0  # the paper's λ
SAMPLES = 32  # for the estimates


class Learner(NamedTuple):
    """One curve: the rates that may be chosen, and the other arguments."""

    title: str
    build: Callable[..., VariationalOptimizer]
    rates: list[dict[str, Any]]
    arguments: dict[str, Any]


def _rates(lr: float, beta: float) -> dict[str, Any]:
    """The rates of the mean and of the precision."""
    return {"lr": lr, "betas": (0.0, 1 - beta)}


GRID = [_rates(lr, beta) for lr, beta in product((0.03, 0.1, 0.3), (0.03, 0.1, 0.3))]
LEARNERS = [
    Learner("CVI, 10 samples", CVI, GRID, {}),
    Learner("Vprop-2", Vprop, GRID, {"scaling": "sum", "mc_samples": 2}),
    Learner("Vprop-0", Vprop0, [_rates(0.1, 0.1)], {"scaling": "sum"}),
    Learner("BBB (Adam)", BBB, [{"lr": lr} for lr in (0.01, 0.02, 0.05, 0.1)], {}),
    # Vprop0 in the mean form with almost no prior is RMSprop.
    Learner(
        "RMSprop",
        Vprop0,
        [_rates(0.01, 0.01)],
        {"prior_precision": 1e-12, "damping": 1e-8, "init_precision": None},
    ),
]


class Point(NamedTuple):
    """Estimates after some updates; the ELBO is None for methods without a posterior."""

    update: int
    negative_elbo: float | None
    log_loss: float


def network(inputs: int, seed: int) -> nn.Sequential:
    """The multi-layer perceptron, with torch's initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 2))


def tuned(learner: Learner, data: Runs, *, run: int, updates: int) -> dict[str, Any]:
    """The rates with the lowest bound after all updates; a run that diverges has none."""
    if len(learner.rates) == 1:
        return learner.rates[0]

    def bound(rates: dict[str, Any]) -> float:
        try:
            (point,) = curve(learner, rates, data, run=run, updates=updates, shown={updates})
        except NonFiniteError:
            return math.inf
        return math.inf if point.negative_elbo is None else point.negative_elbo

    return min(learner.rates, key=bound)


def curve(
    learner: Learner, rates: dict[str, Any], data: Runs, *, run: int, updates: int, shown: set[int]
) -> Iterator[Point]:
    """Train one network."""
    x, y = data.train_x[run], data.train_y[run].long()
    test = data.test_x[run], data.test_y[run].long()
    model = network(x.shape[1], run)
    arguments = {"prior_precision": PRIOR_PRECISION, "init_precision": 0.1 * len(x) + 1, **rates, **learner.arguments}
    opt = learner.build(model, num_data=len(x), seed=run, **arguments)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for t in range(1, updates + 1):
        opt.step(closure)
        if t in shown:
            yield Point(t, *_estimates(opt, model, (x, y), test))


@torch.no_grad()
def _estimates(
    opt: VariationalOptimizer, model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
) -> tuple[float | None, float]:
    """Negative ELBO per training example in nats, and test log-loss of the averaged prediction in bits."""
    losses, log_probabilities = [], []
    for k in range(SAMPLES if opt.noisy else 1):
        with opt.sampled_params(1000 + k):
            losses.append(F.cross_entropy(model(train[0]), train[1]))
            log_probabilities.append(-F.cross_entropy(model(test[0]), test[1], reduction="none"))
    predicted = torch.stack(log_probabilities).logsumexp(0) - math.log(len(log_probabilities))
    bound = torch.stack(losses).mean() + opt.posterior().kl() / len(train[0]) if opt.noisy else None
    return None if bound is None else float(bound), float(-predicted.mean() / math.log(2))
