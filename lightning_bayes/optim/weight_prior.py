"""A prior with a mean and a precision for every weight: the posterior of earlier data, as in continual learning.

    p(θ) = Π_j N(θ_j; μ₀_j, 1/δ_j)        δ̃_j = τ δ_j / Ñ        1/Σ_j = (Ñ/τ)(s_j + δ̃_j + γ)

With μ₀ and δ the means and precisions of q(θ | D₁), training on D₂ minimises the bound whose exact solution is
p(θ | D₁, D₂): variational continual learning, Nguyen et al. 2018 (https://arxiv.org/abs/1710.10628), here with natural
gradients as in Osawa et al. 2019. In the default step δ̃_j counts as curvature that earlier data gave: s_j + δ̃_j takes the
place of s_j in `posteriors.shaped_noise`, whose γ_t adds to it, so that

    1/Σ_j = (Ñ/τ_t)(s_j + δ̃_j + γ_t)                 the prior that belongs to it: N(c_j, 1/δ'_j)
    δ'_j = (Ñ/τ_t)(δ̃_j + γ_t)                         c_j = μ_j - √(δ̃_j / (δ̃_j + γ_t)) (μ_j - μ₀_j)

and the KL's gradient at the mean is δ̃_j (μ_j - μ₀_j), as in the natural step. A posterior of the default step is tempered:
its precisions are those of 1/τ_t times its data, and as a prior it is stronger by that factor.

μ₀ and δ are copied into the optimizer's state of each parameter, as ``prior_mean`` and ``prior_precision``, two tensors
shaped like it. So a checkpoint holds them, and a resumed run keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.spread import is_spread
from lightning_bayes.errors import HyperparameterError, PosteriorError, name_some
from lightning_bayes.optim.effective import Effective, effective
from lightning_bayes.posteriors import AbstractPosterior, MeanField, ScaledPosterior

_ROOM = 80  # characters of names in a message


class WeightPrior(NamedTuple):
    """The prior of one parameter, each shaped like it."""

    mean: Tensor  # μ₀
    precision: Tensor  # δ


def prior_state(
    param: nn.Parameter, group: Mapping[str, Any], priors: Mapping[nn.Parameter, WeightPrior]
) -> dict[str, Tensor]:
    """The prior in the optimizer's state of a parameter before the first update.

    Args:
        param: The parameter.
        group: Its parameter group.
        priors: The result of `weight_priors`.

    Returns:
        μ₀ and δ of its weights, or μ₀ alone where the group's prior is around the initial weights, or nothing.
    """
    if param in priors:
        mean, precision = (part.detach().to(param).clone() for part in priors[param])
        return {"prior_mean": mean, "prior_precision": precision}
    return {"prior_mean": param.detach().clone()} if group["prior_mean"] == "initial" else {}


def holds_priors(states: Mapping[Any, Mapping[str, Any]], priors: Mapping[nn.Parameter, WeightPrior]) -> bool:
    """Whether the optimizer's states hold these priors of single weights and no others, such as after a restart.

    Args:
        states: The optimizer's states.
        priors: The result of `weight_priors`.

    Returns:
        The answer.
    """
    held = {param for param, state in states.items() if "prior_precision" in state}
    return held == priors.keys() & states.keys() and all(
        torch.equal(states[param][f"prior_{name}"], part.to(param))
        for param in held
        for name, part in priors[param]._asdict().items()
    )


def weight_priors(model: nn.Module, posterior: AbstractPosterior | None) -> dict[nn.Parameter, WeightPrior]:
    """The priors of a model's parameters.

    Args:
        model: The model.
        posterior: A `MeanField`, or a `ScaledPosterior` of one, by the model's parameter names; None for no priors.

    Returns:
        By parameter, those that the posterior names.

    Raises:
        PosteriorError: If the posterior is of another family, or its names or shapes are not those of the model, or FSDP2
            spreads it.
    """
    if posterior is None:
        return {}
    found = _mean_field(posterior)
    known = dict(model.named_parameters())
    if any(map(is_spread, known.values())):
        raise PosteriorError(
            f"prior= holds whole tensors, and FSDP2 spreads those of {type(model).__name__} over processes. Pass "
            "prior_precision=... and prior_mean='initial' there."
        )
    missing = [name for name in found.mean if name not in known]
    if missing:
        raise PosteriorError(
            f"prior= names {name_some(missing, _ROOM)}, which {type(model).__name__} lacks; it has "
            f"{name_some(known, _ROOM)}. Take prior.select('prefix.') where names differ by a prefix, or "
            "posteriors.diagnostics.marginals(prior, names) to leave names out."
        )
    wrong = [
        f"{n} {tuple(m.shape)} for {tuple(known[n].shape)}" for n, m in found.mean.items() if m.shape != known[n].shape
    ]
    if wrong:
        raise PosteriorError(
            f"prior= has other shapes than {type(model).__name__}: {name_some(wrong, _ROOM)}. Give a layer of another size "
            "another name, or leave its names out by posteriors.diagnostics.marginals(prior, names)."
        )
    return {known[name]: WeightPrior(mean, found.precision[name]) for name, mean in found.mean.items()}


def refuse_weight_prior(method: str, posterior: AbstractPosterior | None) -> None:
    """Refuse a posterior as prior of a method with matrices.

    Args:
        method: Its name.
        posterior: The user's argument.

    Raises:
        HyperparameterError: If there is one.
    """
    if posterior is not None:
        raise HyperparameterError(
            f"{method} takes no prior={type(posterior).__name__}: a precision for each weight is no Kronecker product. Pass "
            "prior_precision=... and prior_mean='initial', or take a mean-field method such as VOGN."
        )


def prior_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> float | Tensor:
    """δ̃ of a parameter: its own weights' if its state holds ``prior_precision``, else its group's."""
    now, precision = effective(group), state.get("prior_precision")
    return now.prior if precision is None else now.prior_of(precision)


def stated_prior_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> float | Tensor:
    """δ̃ of a parameter; 0 where another optimizer moves the mean and no prior is stated."""
    return prior_of(group, state) if "prior_precision" in state else effective(group).stated_prior


def without_prior(now: Effective) -> Effective:
    """The effective values of weights whose δ̃ counts as curvature."""
    return now._replace(prior_precision=0.0, prior=0.0, stated_prior=0.0)


def noise_terms(group: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> tuple[Effective, list[Tensor]]:
    """The terms of the noise of parameters outside of matrices.

    Args:
        group: Their parameter group.
        states: Their optimizer states; all or none of them hold a ``prior_precision``.

    Returns:
        The effective values, and s of each. Where weights have priors of their own, δ̃ counts as curvature: s + δ̃ of each,
        and values without a prior.
    """
    now, curvatures = effective(group), [state["curvature"] for state in states]
    if "prior_precision" not in states[0]:
        return now, curvatures
    own = [now.prior_of(state["prior_precision"]) for state in states]
    return without_prior(now), list(torch._foreach_add(curvatures, own))


def _mean_field(posterior: AbstractPosterior) -> MeanField:
    """The posterior with a precision for each weight."""
    inner = posterior.posterior if isinstance(posterior, ScaledPosterior) else posterior
    if not isinstance(inner, MeanField):
        raise PosteriorError(
            f"prior= is of the type {type(inner).__name__}, which has no precision for each weight. Pass a MeanField, such "
            "as load_posterior(path), or posteriors.diagnostics.marginals(posterior, posterior.mean), which drops the "
            "correlations."
        )
    width = posterior.scale if isinstance(posterior, ScaledPosterior) else 1.0
    precision = {name: value / width**2 if width != 1 else value for name, value in inner.precision.items()}
    found = MeanField(inner.mean, precision, inner.prior_precision, inner.num_data)
    parts = {name: (found.mean[name], precision[name]) for name in found.mean}
    wrong = [n for n, (mean, p) in parts.items() if not bool((mean.isfinite() & p.isfinite() & (p > 0)).all())]
    if wrong:
        raise PosteriorError(
            f"prior= has means or precisions of {name_some(wrong, _ROOM)} that are not finite, or precisions that are not "
            "above 0. Take the posterior of an earlier checkpoint."
        )
    return found
