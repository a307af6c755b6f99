"""Names and checks of the arguments of `laplace`."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

from lightning_bayes.curvature.likelihood import Bernoulli, Gaussian, Likelihood, Poisson, Softmax
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.predictive import LikelihoodName, Link, find_link

StructureName: TypeAlias = Literal["diagonal", "kronecker", "full"]
PriorPrecision: TypeAlias = float | Literal["marglik", "validation"]
PriorStructure: TypeAlias = Literal["scalar", "layerwise"]

_LIKELIHOODS: dict[Link, Likelihood] = {
    "softmax": Softmax(),
    "sigmoid": Bernoulli(),
    "identity": Gaussian(1.0),
    "exp": Poisson(),
}
_LINKS: dict[type[Likelihood], Link] = {type(likelihood): link for link, likelihood in _LIKELIHOODS.items()}


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
    link = find_link(likelihood, "likelihood")
    if link not in _LIKELIHOODS:
        raise HyperparameterError(f"likelihood={likelihood!r} is not supported: classes must be the second dimension.")
    return _LIKELIHOODS[link], link == "identity"


def link_of(likelihood: Likelihood) -> Link:
    """Return the link that turns outputs into predictions under this likelihood."""
    return _LINKS.get(type(likelihood), "softmax")
