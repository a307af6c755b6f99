"""Labels for the Fisher: from the data (empirical Fisher), or sampled from the model's likelihood."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import nn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood import OutputLikelihood

FisherName: TypeAlias = Literal["empirical", "sampled"]


def check_fisher(fisher: str | None) -> None:
    """Raise `HyperparameterError` unless `fisher` is ``"empirical"``, ``"sampled"`` or None."""
    if fisher not in {None, "sampled", "empirical"}:
        raise HyperparameterError(f"fisher={fisher!r} is unknown; use 'sampled', 'empirical' or None.")


def label_source(
    fisher: FisherName | None, likelihood: OutputLikelihood | None, model: nn.Module
) -> OutputLikelihood | None:
    """Find the likelihood to sample labels from."""
    candidate = likelihood if likelihood is not None else getattr(model, "lightning_bayes_likelihood", None)
    source = candidate if isinstance(candidate, OutputLikelihood) else None
    if fisher == "sampled" and source is None:
        raise HyperparameterError(
            f"fisher='sampled' requires a likelihood that can be sampled, but {type(model).__name__} has {candidate!r}. "
            "Pass likelihood=Categorical(), Bernoulli() or Gaussian(std) from lightning_bayes.likelihood, set it as the "
            "module's attribute `lightning_bayes_likelihood`, or pass fisher='empirical'."
        )
    return None if fisher == "empirical" else source
