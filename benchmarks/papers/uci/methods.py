"""The methods of both tables, with their learners and settings.

All variational methods use the Gamma posterior of the noise precision of Zhang et al., also Vadam and VOGN, for which Khan
et al. tune it. Options, such as the prior precision, are chosen on a fifth of the training rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

from benchmarks.papers.uci.data import Splits
from benchmarks.papers.uci.dropout import DropoutLearner
from benchmarks.papers.uci.learner import Learner, Problem, Scores, evaluate
from benchmarks.papers.uci.mean_field import Algorithm, MeanFieldLearner
from benchmarks.papers.uci.noise import KnownPrecision
from benchmarks.papers.uci.published import DROPOUT_PRECISIONS, DROPOUT_PROBABILITIES
from benchmarks.papers.uci.setting import GAL, KHAN, ZHANG, Setting
from benchmarks.papers.uci.structured import BlockTridiagonalLearner, NoisyKFACLearner
from benchmarks.papers.uci.tuning import tuned
from lightning_bayes.optim.diagonal import bbb, noisy_adam, vadam, vogn
from lightning_bayes.optim.diagonal.state import MeanFieldState

SEED: Final = 0
PRIOR_PRECISIONS: Final = (0.1, 1.0, 10.0)  # within Khan et al.'s bounds, exp(-4) to exp(4)

Run: TypeAlias = Callable[[str, Splits, Setting], Scores]  # name of the set, data, setting


@dataclass(frozen=True)
class Method:
    """One column of the table."""

    title: str
    setting: Setting
    run: Run


def _fixed(build: Callable[[Problem], Learner], name: str, splits: Splits, setting: Setting) -> Scores:
    learner = build(Problem.of(splits, setting, SEED))
    learner.train()
    return evaluate(learner)[0]


def _with_chosen_prior(build: Callable[[Problem], Learner], name: str, splits: Splits, setting: Setting) -> Scores:
    def fit(part: Splits, prior: float) -> list[Scores]:
        return [_fixed(build, name, part, replace(setting, prior_precision=prior))]

    return tuned(splits, PRIOR_PRECISIONS, fit)


def _dropout(name: str, splits: Splits, setting: Setting) -> Scores:
    def fit(part: Splits, probability: float) -> list[Scores]:
        learner = DropoutLearner(Problem.of(part, setting, SEED), probability)
        learner.train()
        return evaluate(learner, *_noises(DROPOUT_PRECISIONS[name], part))

    return tuned(splits, DROPOUT_PROBABILITIES, fit)


def _noises(precisions: Sequence[float], splits: Splits) -> list[KnownPrecision]:
    return [KnownPrecision(precision * splits.target_std**2) for precision in precisions]


def _mean_field(algorithm: Algorithm) -> Callable[[Problem], Learner]:
    return partial(MeanFieldLearner, algorithm=algorithm)


_BBB = _mean_field(Algorithm(bbb.BBBState, bbb.update, "reparameterised"))
_NOISY_ADAM = _mean_field(Algorithm(MeanFieldState, noisy_adam.update, "batch_square", prior_at_sample=True))
_FISHER_ADAM = _mean_field(Algorithm(MeanFieldState, noisy_adam.update, "fisher", prior_at_sample=True))
_VADAM = _mean_field(Algorithm(MeanFieldState, vadam.update, "batch_square", start=0.0, options={"from_zero": True}))
_VOGN = _mean_field(Algorithm(MeanFieldState, vogn.update, "squared_gradients"))

METHODS: Final = {
    "bbb": Method("BBB", ZHANG, partial(_fixed, _BBB)),
    "noisy_adam": Method("Noisy Adam", ZHANG, partial(_fixed, _NOISY_ADAM)),
    "noisy_adam_fisher": Method("Noisy Adam, Fisher", ZHANG, partial(_fixed, _FISHER_ADAM)),
    "noisy_kfac": Method("Noisy K-FAC", ZHANG, partial(_fixed, NoisyKFACLearner)),
    "block_tridiagonal": Method("Block-tridiagonal", ZHANG, partial(_fixed, BlockTridiagonalLearner)),
    "mc_dropout": Method("MC-dropout", GAL, _dropout),
    "vadam": Method("Vadam", KHAN, partial(_with_chosen_prior, _VADAM)),
    "vogn": Method("VOGN", KHAN, partial(_with_chosen_prior, _VOGN)),
}
