"""Choose hyperparameters for every split on a fifth of its training rows, then train on all of them.

Khan et al. choose with Bayesian optimisation and five-fold cross-validation, 30 trials per split; Gal & Ghahramani with a
grid on a fifth. Here it is always a grid on a fifth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from benchmarks.papers.uci.data import Splits
from benchmarks.papers.uci.learner import Scores

OptionT = TypeVar("OptionT")


def tuned(splits: Splits, options: Sequence[OptionT], fit: Callable[[Splits, OptionT], list[Scores]]) -> Scores:
    """Choose by the held-out log-likelihood."""
    held_out = [fit(splits.held_out(), option) for option in options]
    num_evaluations = len(held_out[0])
    best = torch.stack([scores.log_likelihood for evaluations in held_out for scores in evaluations]).argmax(0)
    best_scores = Scores(*(torch.full_like(splits.target_std, torch.nan) for _ in Scores._fields))
    for index, option in enumerate(options):
        chosen = (best // num_evaluations == index).nonzero()[:, 0]  # splits with this option
        if len(chosen) == 0:
            continue
        for evaluation, scores in enumerate(fit(splits.subset(chosen), option)):
            selected = best[chosen] % num_evaluations == evaluation
            for target, values in zip(best_scores, scores, strict=True):
                target[chosen[selected]] = values[selected]
    return best_scores
