"""The rounds: fit from scratch, test, label one row more."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from benchmarks.papers.active_learning.trials import Trials
from benchmarks.papers.predictive_variance.approximations import LEARNERS, PUBLISHED
from benchmarks.papers.uci.learner import Problem, evaluate
from benchmarks.papers.uci.setting import Setting
from lightning_bayes.predictive import variance_score

METHODS: Final = ("bbb", "noisy_adam_fisher", "noisy_kfac")
FITS: Final = 10  # nine rows are labelled between them
SETTING: Final = PUBLISHED  # Zhang et al. 2018, C.3


@torch.no_grad()
def errors(method: str, trials: Trials, setting: Setting, fits: int = FITS) -> Tensor:
    """Test RMSE after each fit.

    Args:
        method: One of `METHODS`.
        trials: The trials at their start; they end with ``fits - 1`` rows more.
        setting: Hyperparameters.
        fits: How often to fit.

    Returns:
        ``[fits, 2 T]``, in the target's units.
    """
    found = []
    for number in range(fits):
        learner = LEARNERS[method](Problem.of(trials.splits(), setting, seed=number))
        learner.train()
        found.append(evaluate(learner)[0].rmse)
        if number + 1 < fits:
            pool = trials.pool_inputs()
            samples = torch.stack([learner.predict(pool) for _ in range(setting.eval_samples)])
            trials.label(variance_score(samples.flatten(1)).view(samples.shape[1:]))
    return torch.stack(found)
