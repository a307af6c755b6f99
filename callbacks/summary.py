"""The summary of a fit in words: one line at the first update, and one at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.errors import name_some
from lightning_bayes.optim import MeanFieldOptimizer
from lightning_bayes.optim.readout import temperature_of
from lightning_bayes.posteriors import diagnostics
from lightning_bayes.predictive import Link

_OF_REGRESSIONS = (
    "their band does not widen away from the data, that of LaplaceCallback('full', 'all') in the place of this callback "
    "does"
)


def at_the_start(optimizer: MeanFieldOptimizer, name: str, link: Link | None, eval_samples: int) -> str:
    """The line at the first update.

    Args:
        optimizer: The optimizer, after an update.
        name: The method's name.
        link: How outputs become predictions.
        eval_samples: S.

    Returns:
        Who moves the mean, what has noise, N, the prior, the noise scale, and how predictions are made.
    """
    group, base = optimizer.param_groups[0], optimizer.base_step
    mover = f"{type(base.base).__name__} moves the mean" if base else f"the {group['step_rule']} step moves the mean"
    noisy, points = (sum(p.numel() for p in _params(optimizer, is_noisy)) for is_noisy in (True, False))
    parts = [f"{name}: {mover}; {noisy:,} weights have noise, {points:,} are points", f"N = {group['num_data']:,}"]
    if noisy:
        samples = f"the mean of {eval_samples} weight samples" if eval_samples else "the posterior mean alone"
        parts += [_prior(optimizer), _noise(group), f"predictions are {samples}" + (f" ({link})" if link else "")]
        if link == "identity" and group["relative_noise"] is not None:
            parts.append(_OF_REGRESSIONS)
    return "; ".join(parts) + "."


def at_the_end(optimizer: MeanFieldOptimizer, name: str) -> str:
    """The line at the end of a fit; arguments as in `at_the_start`.

    Returns:
        How many parameters the data determine, the temperatures, and the size of the noise.
    """
    noisy = _params(optimizer, True)
    total, determined = sum(param.numel() for param in noisy), float(optimizer.effective_parameters())
    logs = sorted(float(tau.log()) for tau in temperatures(optimizer).values())
    if not logs:  # such as in a run that goes on from a checkpoint without noise
        return f"{name}: no weight has noise, so there is no posterior."
    ratio = diagnostics.noise_to_weight(optimizer.posterior())
    return (
        f"{name}: the data determine about {determined:,.0f} of {total:,} parameters beside the prior. log τ of the "
        f"tensors is {logs[0]:.1f} to {logs[-1]:.1f} (0: the Bayesian posterior; less: colder). The noise is {ratio:.1g} "
        "times as large as the weights (root mean squares)."
    )


@torch.no_grad()
def temperatures(optimizer: MeanFieldOptimizer) -> dict[str, Tensor]:
    """τ_t of each tensor with noise, by name; a bias in its weight's matrix has none of its own."""
    names = {param: name for name, param in optimizer.model.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            tau = temperature_of(group, optimizer.state.get(param, {}), param.detach())
            if tau is not None:
                found[names[param]] = tau
    return found


def _params(optimizer: MeanFieldOptimizer, is_noisy: bool) -> list[Tensor]:
    """The trained parameters with noise, or without."""
    return [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad and bool(group["noisy"] and optimizer.state[param].get("noisy", True)) == is_noisy
    ]


def _prior(optimizer: MeanFieldOptimizer) -> str:
    own = {
        name: p.numel()
        for name, p in optimizer.model.named_parameters()
        if "prior_precision" in optimizer.state.get(p, {})
    }
    others = [name for name, p in optimizer.model.named_parameters() if p in optimizer.state and name not in own]
    text = _prior_of_group(optimizer.param_groups[0])
    if not own:
        return text
    named = f"{sum(own.values()):,} weights have the mean and precision of an earlier posterior as prior"
    return f"{named}; for {name_some(others, 60)}, which it does not name, {text}" if others else named


def _prior_of_group(group: dict[str, object]) -> str:
    if group["step_rule"] == "user" and not group["prior_on_mean"]:
        return "no prior is stated, so the mean is unregularised"
    return f"the prior's precision is {group['prior_precision']:g}"


def _noise(group: dict[str, object]) -> str:
    if group["relative_noise"] is None:
        return "the noise is that of the variational bound"
    return f"the curvature places noise of κ = {group['relative_noise']:.2g} times each tensor's size"
