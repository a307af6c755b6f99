"""Hyperparameters chosen for every split on a fifth of its training rows, then training on all of them.

Khan et al. choose by Bayesian optimisation with five-fold cross-validation, in 30 trials for each split; Gal & Ghahramani by
a grid on a fifth. Here it is a grid on a fifth throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from benchmarks.papers.uci.data import Splits
from benchmarks.papers.uci.learner import Scores

OptionT = TypeVar("OptionT")


def tuned(splits: Splits, options: Sequence[OptionT], fit: Callable[[Splits, OptionT], list[Scores]]) -> Scores:
    """Choose by the log-likelihood of what is held out.

    Args:
        splits: The data.
        options: What to train with.
        fit: Trains all splits with one option, and scores them in one or more ways to evaluate, such as noise precisions.

    Returns:
        Scores on the test rows of every split with its own best option and way.
    """
    found = [fit(splits.held_out(), option) for option in options]
    ways = len(found[0])
    best = torch.stack([scores.log_likelihood for each in found for scores in each]).argmax(0)
    chosen = Scores(*(torch.full_like(splits.target_std, torch.nan) for _ in Scores._fields))
    for number, option in enumerate(options):
        which = (best // ways == number).nonzero()[:, 0]
        if len(which) > 0:
            for way, scores in enumerate(fit(splits.subset(which), option)):
                taken = best[which] % ways == way
                for mine, values in zip(chosen, scores, strict=True):
                    mine[which[taken]] = values[taken]
    return chosen
