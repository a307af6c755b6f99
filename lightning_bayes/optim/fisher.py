"""The labels of the Fisher: the data's, or draws from the model."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import nn

from lightning_bayes.curvature import Likelihood
from lightning_bayes.errors import HyperparameterError

FisherName: TypeAlias = Literal["empirical", "sampled"]


def check_fisher(fisher: str | None) -> None:
    """Require a Fisher that exists.

    Args:
        fisher: ``"empirical"``, ``"sampled"``, or None for either.

    Raises:
        HyperparameterError: If it is another value.
    """
    if fisher not in {None, "sampled", "empirical"}:
        raise HyperparameterError(f"fisher={fisher!r} is unknown; use 'sampled', 'empirical' or None.")


def label_source(fisher: FisherName | None, given: Likelihood | None, model: nn.Module) -> Likelihood | None:
    """The likelihood that labels are drawn from.

    Args:
        fisher: ``"empirical"`` draws none, ``"sampled"`` must draw them, None draws them if it can.
        given: A likelihood; None looks for one in the model's attribute ``likelihood``.
        model: The model.

    Returns:
        The likelihood, or None for the labels of the data.

    Raises:
        HyperparameterError: If labels must be drawn and there is nothing to draw them from.
    """
    found = given if given is not None else getattr(model, "likelihood", None)
    known = found if isinstance(found, Likelihood) else None
    if fisher == "sampled" and known is None:
        raise HyperparameterError(
            f"fisher='sampled' draws labels, but the likelihood of {type(model).__name__} is {found!r}, which cannot be "
            "sampled. Pass likelihood=Softmax(), Bernoulli() or Gaussian(std) of lightning_bayes.curvature, set it as the "
            "module's attribute `likelihood`, or pass fisher='empirical'."
        )
    return None if fisher == "empirical" else known
