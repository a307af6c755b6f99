"""Names and checks of the arguments of `laplace`."""

from __future__ import annotations

import difflib
import math
from typing import Literal, TypeAlias, get_args

from lightning_bayes.curvature.likelihood import Bernoulli, Gaussian, Likelihood, Softmax
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.predictive import Link

StructureName: TypeAlias = Literal["diagonal", "kronecker", "full"]
ClassificationName: TypeAlias = Literal["classification", "softmax", "categorical"]
BinaryName: TypeAlias = Literal["binary", "multilabel", "sigmoid", "bernoulli"]
RegressionName: TypeAlias = Literal["regression", "identity", "gaussian"]
LikelihoodName: TypeAlias = ClassificationName | BinaryName | RegressionName
PriorPrecision: TypeAlias = float | Literal["marglik", "validation"]
PriorStructure: TypeAlias = Literal["scalar", "layerwise"]

_LIKELIHOODS: dict[str, Likelihood] = {
    **dict.fromkeys(get_args(ClassificationName), Softmax()),
    **dict.fromkeys(get_args(BinaryName), Bernoulli()),
    **dict.fromkeys(get_args(RegressionName), Gaussian(1.0)),
}
_LINKS: dict[type[Likelihood], Link] = {Softmax: "softmax", Bernoulli: "sigmoid", Gaussian: "identity"}


def check_settings(structure: str, prior_precision: float | str, prior_structure: str) -> None:
    """Raise a `HyperparameterError` for unknown names or a prior precision that is not positive."""
    for name, value, choices in (
        ("structure", structure, get_args(StructureName)),
        ("prior_structure", prior_structure, get_args(PriorStructure)),
    ):
        if value not in choices:
            raise HyperparameterError(f"{name}={value!r} is unknown; use {', '.join(map(repr, choices))}.")
    if isinstance(prior_precision, str):
        if prior_precision not in {"marglik", "validation"}:
            raise HyperparameterError(
                f"prior_precision={prior_precision!r} is unknown; use 'marglik', 'validation' or a positive number."
            )
    elif not 0 < prior_precision < math.inf:
        raise HyperparameterError(f"prior_precision={prior_precision!r} must be positive and finite.")
    if prior_precision == "validation" and prior_structure != "scalar":
        raise HyperparameterError(
            "prior_precision='validation' chooses one number. Use prior_structure='scalar', or prior_precision='marglik'."
        )


def find_likelihood(likelihood: Likelihood | LikelihoodName) -> tuple[Likelihood, bool]:
    """Return the likelihood and whether to choose its noise, which then starts at σ = 1."""
    if isinstance(likelihood, Likelihood):
        return likelihood, False
    if likelihood not in _LIKELIHOODS:
        close = difflib.get_close_matches(str(likelihood), _LIKELIHOODS, 1)
        question = f" Did you mean {close[0]!r}?" if close else ""
        raise HyperparameterError(
            f"likelihood={likelihood!r} is unknown.{question} Use 'classification', 'binary', 'regression', or a Softmax(), "
            "Bernoulli() or Gaussian(std) of lightning_bayes.curvature."
        )
    return _LIKELIHOODS[likelihood], likelihood in get_args(RegressionName)


def link_of(likelihood: Likelihood) -> Link:
    """Return the link that turns outputs into predictions under this likelihood."""
    return _LINKS.get(type(likelihood), "softmax")
