"""The words of the arguments ``link`` and ``likelihood``, and the kind that each names."""

from __future__ import annotations

import difflib
from typing import Final, Literal, TypeAlias, get_args

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood.base import OutputLikelihood
from lightning_bayes.likelihood.bernoulli import Bernoulli
from lightning_bayes.likelihood.categorical import Categorical
from lightning_bayes.likelihood.family import Family, Observation
from lightning_bayes.likelihood.gaussian import Gaussian
from lightning_bayes.likelihood.poisson import Poisson
from lightning_bayes.likelihood.predicted_gaussian import PredictedGaussian

ClassificationName: TypeAlias = Literal["classification", "softmax", "categorical", "multiclass", "softmax_last"]
BinaryName: TypeAlias = Literal["binary", "multilabel", "sigmoid", "bernoulli"]
RegressionName: TypeAlias = Literal["regression", "identity", "gaussian", "normal"]
CountsName: TypeAlias = Literal["counts", "exp", "poisson"]
LikelihoodName: TypeAlias = ClassificationName | BinaryName | RegressionName | CountsName
ObservationName: TypeAlias = Literal["mean_variance", "mean_log_variance", "mean_std", "mean_log_std"]
LinkArgument: TypeAlias = OutputLikelihood | LikelihoodName | ObservationName | Observation

NAMES: Final[dict[str, OutputLikelihood]] = {
    **dict.fromkeys(get_args(ClassificationName), Categorical()),
    **dict.fromkeys(get_args(BinaryName), Bernoulli()),
    **dict.fromkeys(get_args(RegressionName), Gaussian()),
    **dict.fromkeys(get_args(CountsName), Poisson()),
    "softmax_last": Categorical(dim=-1),
    "mean_variance": PredictedGaussian("variance"),
    "mean_log_variance": PredictedGaussian("log_variance"),
    "mean_std": PredictedGaussian("std"),
    "mean_log_std": PredictedGaussian("log_std"),
}
_WORDS: Final = {"classification", "binary", "multilabel", "regression", "counts"}


def find_kind(link: LinkArgument, argument: str = "link") -> OutputLikelihood:
    """The kind that an argument states: itself, of a name or a function; unknown names raise a `HyperparameterError`."""
    if isinstance(link, OutputLikelihood):
        return link
    if callable(link):
        return Family(link)
    if link in NAMES:
        return NAMES[link]
    close = difflib.get_close_matches(str(link).lower(), NAMES, 1)
    question = f" Did you mean {close[0]!r}?" if close else ""
    raise HyperparameterError(
        f"{argument}={link!r} is unknown.{question} Use 'classification', 'binary', 'multilabel', 'regression' or 'counts', "
        f"or one of their synonyms {', '.join(repr(n) for n in NAMES if n not in _WORDS)}."
    )
