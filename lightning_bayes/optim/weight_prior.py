"""Priors with a mean and a precision for every weight: the posterior of earlier data, as in continual learning.

    p(θ) = Π_j N(θ_j; μ₀_j, 1/δ_j)        δ̃_j = τ δ_j / Ñ        1/Σ_j = (Ñ/τ)(s_j + δ̃_j + γ)

If μ₀ and δ are the means and precisions of q(θ | D₁), training on D₂ minimises the bound whose exact solution is
p(θ | D₁, D₂). This is variational continual learning, Nguyen et al. 2018 (https://arxiv.org/abs/1710.10628), with natural
gradients as in Osawa et al. 2019.

With shaped noise, as in the default step, δ̃_j counts as curvature from earlier data: s_j + δ̃_j replaces s_j in
`posteriors.shaped_noise`, which adds its γ_t:

    1/Σ_j = (Ñ/τ_t)(s_j + δ̃_j + γ_t)                 with the prior N(c_j, 1/δ'_j)
    δ'_j = (Ñ/τ_t)(δ̃_j + γ_t)                         c_j = μ_j - √(δ̃_j / (δ̃_j + γ_t)) (μ_j - μ₀_j)

The tempered KL has the gradient δ̃_j (μ_j - μ₀_j) at the mean, as in the natural step. A posterior of the default step is
tempered: its precisions count the data 1/τ_t times, so it is stronger by that factor when used as a prior.

The optimizer's state of each parameter stores copies of μ₀ and δ as ``prior_mean`` and ``prior_precision``, two tensors with
the shape of the parameter. Checkpoints therefore include them, and a resumed run keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError, PosteriorError, name_some
from lightning_bayes.optim.effective import effective
from lightning_bayes.posteriors import AbstractPosterior, MeanField, ScaledPosterior

_NAMES_LENGTH = 80  # characters of names in an error message


class WeightPrior(NamedTuple):
    """The prior of one parameter; both tensors have the shape of the parameter."""

    mean: Tensor  # μ₀
    precision: Tensor  # δ


def prior_state(
    param: nn.Parameter, group: Mapping[str, Any], priors: Mapping[nn.Parameter, WeightPrior]
) -> dict[str, Tensor]:
    """The prior as entries of a parameter's optimizer state."""
    if param in priors:
        mean, precision = (part.detach().to(param).clone() for part in priors[param])
        return {"prior_mean": mean, "prior_precision": precision}
    return {"prior_mean": param.detach().clone()} if group["posterior"]["prior_mean"] == "initial" else {}


def prior_means(states: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """μ₀ of each parameter, from its optimizer state; empty if zero."""
    return [state["prior_mean"] for state in states if "prior_mean" in state]


def holds_priors(states: Mapping[Any, Mapping[str, Any]], priors: Mapping[nn.Parameter, WeightPrior]) -> bool:
    """Whether the per-weight priors in the optimizer's states are exactly `priors`, the result of `weight_priors`."""
    with_prior = {param for param, state in states.items() if "prior_precision" in state}
    return with_prior == priors.keys() & states.keys() and all(
        torch.equal(states[param][f"prior_{name}"], part.to(param))
        for param in with_prior
        for name, part in priors[param]._asdict().items()
    )


def weight_priors(model: nn.Module, posterior: AbstractPosterior | None) -> dict[nn.Parameter, WeightPrior]:
    """Use a posterior as the prior of a model's parameters."""
    if posterior is None:
        return {}
    priors = _priors_of_weights(posterior)
    params = dict(model.named_parameters())
    missing = [name for name in priors if name not in params]
    if missing:
        raise PosteriorError(
            f"prior= names {name_some(missing, _NAMES_LENGTH)}, which {type(model).__name__} does not have; its parameters "
            f"are {name_some(params, _NAMES_LENGTH)}. Use prior.select('prefix.') if the names differ by a prefix, or "
            "posteriors.marginals(prior, names) to drop names."
        )
    wrong = [
        f"{name} {tuple(mean.shape)} instead of {tuple(params[name].shape)}"
        for name, (mean, _) in priors.items()
        if mean.shape != params[name].shape
    ]
    if wrong:
        raise PosteriorError(
            f"prior= has shapes that differ from {type(model).__name__}: {name_some(wrong, _NAMES_LENGTH)}. Rename the "
            "layer if its size has changed, or drop its names with posteriors.marginals(prior, names)."
        )
    return {params[name]: prior for name, prior in priors.items()}


def refuse_weight_prior(method: str, posterior: AbstractPosterior | None) -> None:
    """Raise `HyperparameterError` if a Kronecker-factored method is given a posterior as its prior."""
    if posterior is not None:
        raise HyperparameterError(
            f"{method} does not support prior={type(posterior).__name__}: per-weight precisions do not form a Kronecker "
            "product. Pass prior_precision=... and prior_mean='initial', or use a mean-field method such as VOGN."
        )


def prior_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> float | Tensor:
    """δ̃ of a parameter: one value per weight if its state has a ``prior_precision``, otherwise its group's δ̃."""
    hyperparameters, precision = effective(group), state.get("prior_precision")
    return hyperparameters.prior if precision is None else hyperparameters.prior_of(precision)


def stated_prior_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> float | Tensor:
    """δ̃ of a parameter; 0 if the user's optimizer updates the mean and no prior is set."""
    return prior_of(group, state) if "prior_precision" in state else effective(group).stated_prior


def _priors_of_weights(posterior: AbstractPosterior) -> dict[str, WeightPrior]:
    """The means and precisions of a mean-field posterior, with the scale of a `ScaledPosterior`, by name."""
    inner = posterior.posterior if isinstance(posterior, ScaledPosterior) else posterior
    if not isinstance(inner, MeanField):
        raise PosteriorError(
            f"prior= is a {type(inner).__name__}, which has no precision for each weight. Pass a MeanField, such as "
            "load_posterior(path), or posteriors.marginals(posterior, posterior.mean), which drops the "
            "correlations."
        )
    scale = posterior.scale if isinstance(posterior, ScaledPosterior) else 1.0
    priors = {name: WeightPrior(mean, inner.precision[name] / scale**2) for name, mean in inner.mean.items()}
    invalid = [
        name
        for name, (mean, precision) in priors.items()
        if not bool((mean.isfinite() & precision.isfinite() & (precision > 0)).all())
    ]
    if invalid:
        raise PosteriorError(
            f"prior= has non-finite means or precisions, or precisions that are not above 0, in "
            f"{name_some(invalid, _NAMES_LENGTH)}. Use the posterior of an earlier checkpoint."
        )
    return priors
