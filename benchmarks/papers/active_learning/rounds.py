"""The rounds: fit from scratch, test, label one more row."""

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
FITS: Final = 10  # with nine new labels between them
SETTING: Final = PUBLISHED  # Zhang et al. 2018, C.3


@torch.no_grad()
def errors(method: str, trials: Trials, setting: Setting, fits: int = FITS) -> Tensor:
    """Test RMSE after each fit."""
    rmse = []
    for number in range(fits):
        learner = LEARNERS[method](Problem.of(trials.splits(), setting, seed=number))
        learner.train()
        rmse.append(evaluate(learner)[0].rmse)
        if number + 1 < fits:
            pool = trials.pool_inputs()
            samples = torch.stack([learner.predict(pool) for _ in range(setting.eval_samples)])
            trials.label(variance_score(samples.flatten(1)).view(samples.shape[1:]))
    return torch.stack(rmse)
