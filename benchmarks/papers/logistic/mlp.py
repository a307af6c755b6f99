"""Fig. 3 of the Vprop paper: two hidden layers of ten units on australian and a1a, with the package's optimizers.

The network has two outputs and a softmax instead of one output and a sigmoid, because BackPACK has the Hessian of
cross-entropy only. The ELBO is estimated from posterior samples. All data are in one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.papers.logistic.model import Runs
from lightning_bayes.optim import BBB, CVI, VariationalOptimizer, Vprop, Vprop0

PRIOR_PRECISION = 1.0  # the paper's λ
SAMPLES = 32  # for the estimates


class Learner(NamedTuple):
    """One curve."""

    title: str
    build: Callable[..., VariationalOptimizer]
    arguments: dict[str, Any]


def _rate(beta: float) -> dict[str, Any]:
    """The same rate for mean and precision."""
    return {"lr": beta, "betas": (0.0, 1 - beta)}


LEARNERS = [
    Learner("CVI, 10 samples", CVI, _rate(0.1)),
    Learner("Vprop-2", Vprop, {**_rate(0.1), "scaling": "sum", "mc_samples": 2}),
    Learner("Vprop-0", Vprop0, {**_rate(0.1), "scaling": "sum"}),
    Learner("BBB (Adam)", BBB, {"lr": 0.05}),
    # Vprop0 in the mean form with almost no prior is RMSprop.
    Learner(
        "RMSprop",
        Vprop0,
        {"lr": 0.01, "betas": (0.0, 0.99), "prior_precision": 1e-12, "damping": 1e-8, "init_precision": None},
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


def curve(learner: Learner, data: Runs, *, run: int, updates: int, shown: set[int]) -> Iterator[Point]:
    """Train one network."""
    x, y = data.train_x[run], data.train_y[run].long()
    test = data.test_x[run], data.test_y[run].long()
    model = network(x.shape[1], run)
    arguments = {"prior_precision": PRIOR_PRECISION, "init_precision": 0.1 * len(x) + 1, **learner.arguments}
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
