"""The default step of the callbacks: the user's optimizer moves the mean, and the algorithm shapes the posterior.

The objective, over means μ_t and diagonal covariances Σ_t of the tensors t, is

    E_q[f̄(θ)] + Σ_t (τ_t/Ñ) KL( N(μ_t, Σ_t) ‖ N(c_t, δ_t⁻¹ I) )

Its gradient with respect to the mean is E_q[∇f̄] + δ̃ (μ - μ₀) for a stated prior N(μ₀, 1/δ), and E_q[∇f̄] without one. The
stationary points do not depend on the preconditioner. So gradients are computed at samples, the prior's gradient is added,
and the user's Adam, AdamW, SGD or other optimizer takes the step with its own learning rate and schedule:

    g = ĝ + δ̃ (μ - μ₀)        μ ← user's optimizer (μ, g)

The covariance that minimises the objective is 1/Σ = (Ñ/τ_t)(s + γ_t); `posteriors.shaped_noise` defines τ_t, γ_t, δ_t and
c_t. The algorithm measures and averages s from the first batch on: s₁ = ĥ₁, measured without noise, and

    β₂(t) = min(β₂, (t-1)/t)   a running mean first, a running average later.

A loss that is a sum over n examples has n times this gradient, with n δ̃ in place of δ̃, and its L2 penalty is shared by n
examples: δ = Ñ·wd/(nτ).

Without noise this **is** the user's training, bit for bit, except for the bound on SGD's steps (below) and for a prior that
the user states. Both optimizers hold one list of parameter groups, so schedulers, hooks and changes of a group act on both.
For the natural-gradient step of the papers and its objective, pass a learning rate.

A prior is stated by its precision or mean, or by an L2 penalty, δ = Ñ·wd/τ, whose gradient the user's optimizer adds itself.
A stated precision takes the penalty's place. Without a stated prior the mean is unregularised. An implicit prior would not
be weak: Adam divides by the size of the gradient, so weights that few examples reach would move to μ₀ at full speed, however
small δ̃ is. AdamW's decoupled weight decay moves the mean too and is not part of the objective.

**Heuristics**, chosen on some seeds of the problems of ``python -m benchmarks.defaults`` and reported on others
(docs/defaults.md): the temperatures τ_t, which give each tensor noise with a root mean square of κ times its size r_t; κ and
ε by kind of network (`optim.default_noise`); and a bound on steps proportional to the gradient, such as SGD's. SGD trains at
the edge of stability, where a few unlucky samples can throw the weights off for good. Its finished step, after all
averaging, is shortened to 3 % of each tensor's size, RMS(Δμ) ≤ 0.03 r, and its momentum by the same factor, as in You et al.
2017 (https://arxiv.org/abs/1708.03888).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.errors import HyperparameterError, UnsupportedTrainingError
from lightning_bayes.optim.default_noise import DefaultNoise
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.hyperparameters import DecayKind
from lightning_bayes.optim.measuring import BASE_INTERVAL
from lightning_bayes.optim.steps import CohortUpdate, NaturalStep, Step, TrustRegionStep
from lightning_bayes.optim.weight_prior import prior_means
from lightning_bayes.posteriors import root_mean_squares, tensor_sizes

PRIOR_PRECISION = 0.1  # δ for the width of the posterior without a stated prior
LONGEST_MOVE = 0.03  # bound on a step of `GRADIENT_STEPS`, relative to the tensor's size
GRADIENT_STEPS = (torch.optim.SGD, torch.optim.ASGD)  # optimizers whose steps are proportional to the gradient
_NO_CLOSURE = ("closure", "'NoneType' object is not callable")  # in errors of steps that call their closure


@final
class BaseOptimizerStep(Step):
    """Moves the means with the user's optimizer `base`, whose parameter groups are the noisy optimizer's too."""

    uses_natural_update = False

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self._move = base.step  # bound before a callback redirects it
        self._follows_gradients = isinstance(base, GRADIENT_STEPS)

    def apply(self, update: CohortUpdate) -> None:
        """Update the curvature of one cohort, and add the prior's gradient to ``param.grad``."""
        update.average_()
        if prior := update.prior_weights():
            penalty = effective(update.group).penalty  # of the loss as it is
            if isinstance(prior, (int, float)):
                is_penalty = update.group["posterior"]["decay"] == "prior" and penalty
                prior = penalty if is_penalty else prior * update.summed
            elif update.summed != 1:
                prior = [each * update.summed for each in prior]
            add_prior_gradient_(update.params, update.states, prior, penalty)

    @torch.no_grad()
    @override
    def finish(self, groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, dict[str, Any]]) -> None:
        starts = copies_before_step(groups, states) if self._follows_gradients else {}
        try:
            self._move()
        except Exception as error:
            if not any(words in str(error) for words in _NO_CLOSURE):
                raise
            raise UnsupportedTrainingError(
                f"{type(self.base).__name__} computes the gradient again within its step ({error}). A noisy update "
                "computes it once. Use Adam, AdamW, SGD or another optimizer that steps from one gradient."
            ) from error
        if starts:
            bound_steps_(starts, states, self.base.state)


def defaults_with_base(arguments: Mapping[str, Any], *, amortises: bool) -> dict[str, Any]:
    """Defaults if another optimizer moves the means: fewer measurements, no implied prior, noise relative to the weights."""
    states_prior = "prior_precision" in arguments or arguments.get("prior_mean", "zero") != "zero"
    return {
        "step_rule": "user",
        "prior_precision": PRIOR_PRECISION,
        "prior_on_mean": states_prior,
        "curvature_interval": BASE_INTERVAL if amortises else 1,
        "relative_noise": DefaultNoise.first,
    }


def copies_before_step(groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, Any]) -> dict[Tensor, Tensor]:
    """Copies of the parameters that are about to move, if `states` contains them."""
    params = (param for group in groups for param in group["params"])
    return {param: param.detach().clone() for param in params if param in states and param.grad is not None}


def bound_steps_(
    starts: Mapping[Tensor, Tensor],
    states: Mapping[Tensor, Mapping[str, Any]],
    base_states: Mapping[Tensor, dict[str, Any]],
) -> None:
    """Shorten each tensor's step to RMS(Δμ) ≤ 0.03 r, and its momentum by the same factor."""
    params_by_kind: dict[Any, list[Tensor]] = {}
    for param in starts:
        params_by_kind.setdefault((param.device, param.dtype), []).append(param)
    for params in params_by_kind.values():
        before, after = [starts[param] for param in params], [param.detach() for param in params]
        bounds = LONGEST_MOVE * tensor_sizes(before, [states[param]["initial_rms"] for param in params])
        steps = torch._foreach_sub(after, before)
        factors = (bounds / torch.maximum(root_mean_squares(steps), bounds)).unbind()  # at most 1
        for param, end, start, step, factor in zip(params, after, before, steps, factors, strict=True):
            end.copy_(torch.where(factor < 1, start.addcmul_(step, factor), end))  # a factor of 1 keeps the exact bits
            if (buffer := base_states[param].get("momentum_buffer")) is not None:
                buffer.mul_(factor)


def add_prior_gradient_(
    params: Sequence[nn.Parameter],
    states: Sequence[Mapping[str, Any]],
    prior: float | Sequence[Tensor],
    penalty: float = 0.0,
) -> None:
    """Add δ̃ (μ - μ₀) to ``param.grad``, less the L2 penalty's gradient that the user's optimizer will add."""
    has_grad = [param.grad is not None for param in params]
    moved = list(compress(params, has_grad))
    if not prior or not moved:
        return
    grads = [param.grad for param in moved if param.grad is not None]
    centres = prior_means(list(compress(states, has_grad)))
    if not isinstance(prior, (int, float)):
        torch._foreach_addcmul_(
            grads, torch._foreach_sub(list[Tensor](moved), centres), list(compress(prior, has_grad))
        )
        if penalty:
            torch._foreach_add_(grads, list[Tensor](moved), alpha=-penalty)
        return
    if prior != penalty:
        torch._foreach_add_(grads, list[Tensor](moved), alpha=prior - penalty)
    if centres:
        torch._foreach_add_(grads, centres, alpha=-prior)


def make_steps(base: torch.optim.Optimizer | None) -> dict[str, Step]:
    """The steps available to an optimizer's groups, by step rule; with a `base` optimizer, its step alone."""
    if base is None:
        return {"natural": NaturalStep(), "trust_region": TrustRegionStep()}
    return {"user": BaseOptimizerStep(base)}


def step_for(step_rule: str, steps: Mapping[str, Step]) -> Step:
    """The step of a rule; raises `HyperparameterError` if the rule and the base optimizer do not match."""
    if step_rule not in steps:
        base = steps.get("user")
        name = type(base.base).__name__ if isinstance(base, BaseOptimizerStep) else None
        raise HyperparameterError(
            f"step_rule={step_rule!r} and base={name} do not match: step_rule='user' requires a base optimizer, and no "
            "other rule allows one. Pass that optimizer as base=..., or leave both out."
        )
    return steps[step_rule]


_DECOUPLED = ("Adafactor", "Muon", "Lion", "Adan", "SophiaG", "Tiger")  # and names with "AdamW" or a final "W"
_PENALISED = ("SGD", "ASGD", "Adam", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop")
_PENALISED_CLASSES = tuple(getattr(torch.optim, name) for name in _PENALISED)


def decay_kind(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], *, states_precision: bool) -> DecayKind:
    """What a group's ``weight_decay`` is."""
    name, says = type(optimizer).__name__, group.get("decoupled_weight_decay")
    is_torch_adamw = isinstance(optimizer, torch.optim.AdamW)  # no group of the oldest torch says so
    if says or is_torch_adamw or "AdamW" in name or name.endswith("W") or name in _DECOUPLED:
        return "decoupled"
    if says is None and not isinstance(optimizer, _PENALISED_CLASSES):
        return "unknown"
    return "replaced" if states_precision else "prior"
