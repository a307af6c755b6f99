"""The lines that a fit prints, at the first update and at the end, and the metrics that it logs after each epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_bayes.callbacks.evaluation.mean_comparison import Comparison
from lightning_bayes.errors import name_some
from lightning_bayes.likelihood import Gaussian, Likelihood, PredictedGaussian, Raw
from lightning_bayes.optim import VariationalOptimizer
from lightning_bayes.optim.effective import effective
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.strategies import BayesDDPStrategy

_STEPS = {"natural": "the natural-gradient step", "trust_region": "the trust-region step"}
_LAPLACE_BAND = (
    "The predictive band does not widen away from the data; to get one that does, replace this callback by "
    "LaplaceCallback(subset='all')"
)
_ENSEMBLE_BAND = (
    "The predictive band does not widen away from the data; to get one that does, replace this callback by "
    "DeepEnsembleCallback(5)"
)
_FOLLOWS = "; it grows after epochs whose training loss is below the validation NLL"
_ADVICE = " The samples hardly differ from each other. For networks that differ, use DeepEnsembleCallback(5)."


def at_the_start(
    optimizer: VariationalOptimizer, name: str, known: Likelihood, eval_samples: int, follows: bool = False
) -> str:
    """The line after the first update: step, number of parameters with a posterior, N, prior, noise and prediction."""
    group, base = optimizer.param_groups[0], optimizer.base_step
    step = type(base.base).__name__ if base else _STEPS[group["posterior"]["step_rule"]]
    noisy, deterministic = _count(_params(optimizer, noisy=True)), _count(_params(optimizer, noisy=False))
    sentences = [
        f"{name}: {step} updates the mean",
        f"{noisy:,} of {noisy + deterministic:,} parameters have a posterior",
        f"N = {group['posterior']['num_data']:,} training examples",
    ]
    if noisy:
        kinds = [scored.kind for scored in known.outputs if scored.kind.state() != Raw().state()]
        names = " and ".join(dict.fromkeys(kind.name for kind in kinds if not isinstance(kind, Raw)))
        averages = f"average {eval_samples} weight samples" if eval_samples else "use the posterior mean"
        sentences += [
            _prior(optimizer),
            _noise(group) + _FOLLOWS * follows,
            f"Predictions {averages}" + (f" ({names} likelihood)" if names else ""),
        ]
        if kinds and not any(kind.has_classes for kind in kinds) and group["posterior"]["relative_noise"] is not None:
            is_gaussian = known.only is not None and isinstance(known.only.kind, (Gaussian, PredictedGaussian))
            sentences.append(_LAPLACE_BAND if is_gaussian else _ENSEMBLE_BAND)  # Laplace refuses other losses
    return ". ".join(sentences) + "."


def at_the_end(
    optimizer: VariationalOptimizer, name: str, validated: Comparison | None, path: Sequence[float] = ()
) -> str:
    """The line at the end of a fit: what the samples change on the validation set, and the size of the noise."""
    if not _params(optimizer, noisy=True):  # such as in a run resumed from a checkpoint without noise
        return f"{name}: no parameter has noise, so there is no posterior."
    noise = f"the RMS noise is {_noise_to_weight(optimizer.posterior()):.1g} times the RMS weight"
    if path:  # of the default noise that follows the fit
        kappa = optimizer.param_groups[0]["posterior"]["relative_noise"]
        moved = "stayed at" if not max(path) else "ended at" if path[-1] == max(path) else "rose and fell again, to"
        noise = f"{noise}; κ {moved} {kappa:.2g}, as the losses told"
    if validated is None:
        return f"{name}: {noise}. With validation batches (inputs, targets), this line shows what the samples change."
    return f"{name}: {validated.summary()}; {noise}.{_ADVICE if validated.hardly_differs else ''}"


def _noise_to_weight(posterior: AbstractPosterior) -> float:
    """√(Σ σ² / Σ μ²), infinite if all weights are zero."""
    squares = (posterior.variance(), {name: mean.square() for name, mean in posterior.mean.items()})
    noise, weights = (sum(float(part.double().sum()) for part in parts.values()) for parts in squares)
    return math.sqrt(noise / weights) if weights else math.inf


def epoch_metrics(trainer: Trainer, optimizer: VariationalOptimizer) -> dict[str, float]:
    """Metrics to log after an epoch, by key."""
    metrics = {"posterior/skipped_updates": float(optimizer.skipped_steps)}
    if optimizer.noisy:
        metrics["posterior/effective_parameters"] = float(optimizer.effective_parameters())
    if isinstance(trainer.strategy, BayesDDPStrategy) and trainer.strategy.reduced_bytes is not None:
        metrics["distributed/reduced_mib"] = trainer.strategy.reduced_bytes / 2**20
    return metrics


def _params(optimizer: VariationalOptimizer, *, noisy: bool) -> list[Tensor]:
    """The trained parameters with noise, or those without."""
    return [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad
        and bool(group["posterior"]["noisy"] and optimizer.state[param].get("noisy", True)) == noisy
    ]


def _count(params: Iterable[Tensor]) -> int:
    return sum(param.numel() for param in params)


def _prior(optimizer: VariationalOptimizer) -> str:
    group = optimizer.param_groups[0]
    default = f"the prior precision is {effective(group).prior_precision:g}"
    if not effective(group).stated_prior:
        default = _without_prior(optimizer)
    params = [(name, param) for name, param in optimizer.model.named_parameters() if param in optimizer.state]
    with_prior = [param for _, param in params if "prior_precision" in optimizer.state[param]]
    others = [name for name, param in params if "prior_precision" not in optimizer.state[param]]
    if not with_prior:
        return default[0].upper() + default[1:]
    text = f"{_count(with_prior):,} parameters have an earlier posterior as their prior"
    return f"{text}; for {name_some(others, 60)}, {default}" if others else text


def _without_prior(optimizer: VariationalOptimizer) -> str:
    """What regularises the mean instead."""
    decays = {group["posterior"]["decay"] for group in optimizer.param_groups if group.get("weight_decay")}
    owner = type(optimizer.groups_owner).__name__
    if "unknown" in decays:
        return f"no prior is set: weight_decay of {owner} acts, but may not be an L2 penalty (pass prior_precision=)"
    if decays:
        return f"no prior is set: the decoupled weight decay of {owner} acts on the mean"
    return "no prior is set, so the mean is unregularised"


def _noise(group: Mapping[str, Any]) -> str:
    if group["posterior"]["relative_noise"] is None:
        return "The noise follows from the variational bound"
    noise = group["posterior"]["relative_noise"]
    return f"The noise scale is κ = {noise:.2g} times each tensor's size, shaped by the curvature"
