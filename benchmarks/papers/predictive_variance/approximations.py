"""Variances of the variational posteriors: the learners of `benchmarks.papers.uci` on the trials.

Zhang et al. 2018, C.3: 10 hidden units, α = 0.01, β̃ = 0.01, 1000 weight samples, 20000 epochs, no extra damping. As in their
other regressions (C.1), batches have 10 rows, steps have 10 weight samples, and the learning rate falls to a tenth in the
second half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from benchmarks.papers.uci.data import Splits
from benchmarks.papers.uci.learner import Learner, Problem
from benchmarks.papers.uci.mean_field import Algorithm, MeanFieldLearner
from benchmarks.papers.uci.setting import Setting
from benchmarks.papers.uci.structured import BlockTridiagonalLearner, NoisyKFACLearner
from lightning_bayes.optim.diagonal import bbb, noisy_adam
from lightning_bayes.optim.diagonal.state import MeanFieldState

PUBLISHED: Final = Setting(
    epochs=20_000,
    batch=(10, 10),
    mc_samples=(10, 10),
    lr=0.01,
    betas=(0.9, 0.99),
    decays=True,
    num_hidden=10,
    eval_samples=1000,
)

_BBB = Algorithm(bbb.BBBState, bbb.update, "reparameterised")
_FISHER_ADAM = Algorithm(MeanFieldState, noisy_adam.update, "fisher", prior_at_sample=True)

LEARNERS: Final[dict[str, Callable[[Problem], Learner]]] = {
    "bbb": lambda problem: MeanFieldLearner(problem, _BBB),
    "noisy_adam_fisher": lambda problem: MeanFieldLearner(problem, _FISHER_ADAM),
    "noisy_kfac": NoisyKFACLearner,
    "block_tridiagonal": BlockTridiagonalLearner,
}
MEAN_FIELD: Final = ("bbb", "noisy_adam_fisher")


def variances(method: str, trials: Splits, setting: Setting) -> Tensor:
    """Train a method of `LEARNERS` on all trials at once, and return the variance of f at the queries, ``[R, m]``."""
    with torch.no_grad():
        learner = LEARNERS[method](Problem.of(trials, setting, seed=0))
        learner.train()
        return torch.stack([learner.predict(trials.test.inputs) for _ in range(setting.eval_samples)]).var(0)
