"""The default step of a callback: the user's own optimizer moves the mean, the algorithm shapes the posterior.

One objective, over the means μ_t and diagonal covariances Σ_t of the tensors t:

    E_q[f̄(θ)] + Σ_t (τ_t/Ñ) KL( N(μ_t, Σ_t) ‖ N(c_t, δ_t⁻¹ I) )

Its gradient with respect to the mean is E_q[∇f̄] + δ̃ (μ - μ₀) where a prior N(μ₀, 1/δ) is stated, and E_q[∇f̄] where none is.
A stationary point does not depend on what divides the gradient on the way there, so gradients are taken at samples, the
prior's is added, and the user's Adam, AdamW, SGD or other optimizer steps with its own learning rate and schedule:

    g = ĝ + δ̃ (μ - μ₀)        μ ← user's optimizer (μ, g)

The covariance that minimises the objective is 1/Σ = (Ñ/τ_t)(s + γ_t), where `posteriors.shaped_noise` has τ_t, γ_t, δ_t and
c_t. s is measured and averaged as the algorithm says, from the first batch on: s₁ = ĥ₁ without noise, and

    β₂(t) = min(β₂, (t-1)/t)   a running mean first, a running average later.

Without noise and prior this **is** the user's training, except for a bound of SGD's steps (below) and for rounding: on a CPU
torch's own optimizers step by their fused kernels (`optim.steps.fused`). Paths differ from those of
natural gradients: pass a learning rate for the papers' step, and its objective.

A prior is stated by its precision or mean, or by an L2 penalty. Without one the mean is unregularised. An implicit prior
would not be weak: Adam divides by the gradient's size, so weights that few examples reach would go to μ₀ at full
speed, however small δ̃ is. AdamW's decoupled decay moves the mean too, and is not part of the objective.

**Heuristics**, chosen on some seeds of problems of ``python -m benchmarks.defaults`` and reported on others
(docs/defaults.md): the temperatures τ_t, which give each tensor noise of a root mean square of κ times its size r_t; κ and ε
by kind of network; and, for steps in proportion to the gradient such as SGD's, a bound. SGD trains at the edge of stability,
where a few unlucky samples throw the weights out for good. There the finished step, after all averaging, is shortened to
3 % of each tensor's size, RMS(Δμ) ≤ 0.03 r, and so is its momentum, as in You et al. 2017
(https://arxiv.org/abs/1708.03888).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.steps.fused import fused_on_cpu
from lightning_bayes.optim.steps.graft import graft_
from lightning_bayes.optim.steps.step import Cohort, Step
from lightning_bayes.posteriors import root_mean_squares, tensor_sizes

NOISE_OF_CLASSIFIERS = 0.05  # κ of classifiers without convolutions
NOISE_OF_CONVOLUTIONS = 0.3  # κ of classifiers with convolutions
FLATNESS_OF_CONVOLUTIONS = 1.0  # ε of classifiers with convolutions
NOISE_OF_NORMALISED = 0.02  # κ of classifiers with normalisation layers
NOISE_OF_REGRESSIONS = 0.01  # κ of regressions and of unknown losses
SHALLOW = 5  # layers, as in LeNet; deeper networks have less noise
PRIOR_PRECISION = 0.1  # δ of the posterior's width where no prior is stated
LONGEST_MOVE = 0.03  # of a tensor's size, by one step of `GRADIENT_STEPS`
GRADIENT_STEPS = (torch.optim.SGD, torch.optim.ASGD)  # optimizers whose steps are in proportion to the gradient
STATE_KEY = "base"  # of the base optimizer in the noisy optimizer's state_dict


@final
class BaseOptimizerStep(Step):
    """Steps with another optimizer, whose ``state_dict`` is part of the noisy optimizer's.

    Args:
        base: The user's optimizer, over the same parameters in the same groups.
        cycles_momentum: Whether a scheduler changes the momentum of the noisy optimizer's groups.
        grafts: Whether the base optimizer gives the length of the step only, and the natural gradient its direction; see
            `optim.steps.graft`.
    """

    uses_update = False

    def __init__(self, base: torch.optim.Optimizer, cycles_momentum: bool = False, grafts: bool = False) -> None:
        self.base, self.cycles_momentum, self.grafts = base, cycles_momentum, grafts

    @property
    def follows_gradients(self) -> bool:
        """Whether the steps are in proportion to the gradient."""
        return isinstance(self.base, GRADIENT_STEPS)

    def apply(self, cohort: Cohort) -> None:
        """Update the curvature of one cohort and leave G in ``param.grad``; see `Step`."""
        cohort.average_(self.weight_of_old(cohort.group["betas"][1], cohort.measurements, cohort.since))
        add_prior_gradient_(cohort.params, cohort.prior_means, cohort.prior_weights())

    def add_group(self, group: Mapping[str, Any], count: int) -> None:
        """Give the user's optimizer a group that came later; see `Step`."""
        if count > len(self.base.param_groups):
            self.base.add_param_group({"params": list(group["params"]), "lr": group["lr"]})

    @torch.no_grad()
    def finish(self, groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Move the means by their gradients, at the learning rates of `groups`; see `Step`."""
        for own, group in zip(self.base.param_groups, groups, strict=True):
            own["lr"] = group["lr"]
            if self.cycles_momentum and "momentum" in own:
                own["momentum"] = group["momentum"]
            if self.cycles_momentum and "betas" in own:
                own["betas"] = (group["betas"][0], *own["betas"][1:])
        starts = copies(self.base.param_groups, states) if self.follows_gradients or self.grafts else {}
        with fused_on_cpu(self.base):
            self.base.step()
        if self.grafts:
            graft_(groups, starts, states, self.base.state)
        if not self.follows_gradients:
            return
        bound_steps_(starts, states, self.base.state)

    def load_state_dict(self, state_dict: Mapping[str, Any], states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Restore the base optimizer.

        Args:
            state_dict: A state of the noisy optimizer, with the base optimizer's under ``base``.
            states: The noisy optimizer's state after it was restored. Files of version 0.1.0.dev0 hold the base
                optimizer's state of each parameter there; it is moved to the base optimizer.
        """
        if STATE_KEY in state_dict:
            self.base.load_state_dict(state_dict[STATE_KEY])
        for param, state in states.items():
            if STATE_KEY in state:
                self.base.state[param] = state.pop(STATE_KEY)


def copies(groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, Any]) -> dict[Tensor, Tensor]:
    """Copies of the parameters that a step is about to move and that `states` holds."""
    params = (param for group in groups for param in group["params"])
    return {param: param.detach().clone() for param in params if param in states and param.grad is not None}


def bound_steps_(
    starts: Mapping[Tensor, Tensor],
    states: Mapping[Tensor, Mapping[str, Any]],
    base_states: Mapping[Tensor, dict[str, Any]],
) -> None:
    """Shorten each tensor's step to RMS(Δμ) ≤ 0.03 r, and its momentum by the same factor.

    Args:
        starts: Parameters before the step, by parameter; these are moved back.
        states: The noisy optimizer's, with each tensor's ``scale``, its size at the start.
        base_states: The base optimizer's, with a ``momentum_buffer`` where it has momentum.
    """
    alike: dict[Any, list[Tensor]] = {}
    for param in starts:
        alike.setdefault((param.device, param.dtype), []).append(param)
    for params in alike.values():
        before, after = [starts[param] for param in params], [param.detach() for param in params]
        most = LONGEST_MOVE * tensor_sizes(before, [states[param]["scale"] for param in params])
        steps = torch._foreach_sub(after, before)
        factors = (most / torch.maximum(root_mean_squares(steps), most)).unbind()  # at most 1
        for param, end, start, step, factor in zip(params, after, before, steps, factors, strict=True):
            end.copy_(torch.where(factor < 1, start.addcmul_(step, factor), end))  # else exactly the user's
            if (buffer := base_states[param].get("momentum_buffer")) is not None:
                buffer.mul_(factor)


def noisy_layers(groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, Mapping[str, Any]]) -> int:
    """How many weights of layers, tensors of two or more dimensions, are trained under noise.

    Args:
        groups: The noisy optimizer's groups.
        states: Its state.

    Returns:
        L.
    """
    params = (param for group in groups if group["noisy"] for param in group["params"])
    return sum(param.dim() > 1 and param.requires_grad and states[param].get("noisy", True) for param in params)


def noise_of_depth(share: float, layers: int) -> float:
    """κ of a network of L layers: each adds noise of about κ times its output's size, together κ √L, so κ √L stays bounded.

    Args:
        share: κ of networks of up to five layers.
        layers: L.

    Returns:
        κ √(5 / L) where L is above 5.

    Example:
        >>> noise_of_depth(0.3, 3), noise_of_depth(0.3, 20)
        (0.3, 0.15)
    """
    return share * math.sqrt(SHALLOW / max(SHALLOW, layers))


def add_prior_gradient_(
    params: Sequence[nn.Parameter], prior_means: Sequence[Tensor], prior: float | Sequence[Tensor]
) -> None:
    """G ← g + δ̃ (μ - μ₀) in ``param.grad``.

    Args:
        params: Parameters with gradients.
        prior_means: μ₀ of each; empty for zero.
        prior: δ̃; 0 for none. Or δ̃ of each parameter's weights, which have a μ₀.
    """
    if not prior:
        return
    grads = [param.grad for param in params if param.grad is not None]
    if not isinstance(prior, (int, float)):
        torch._foreach_addcmul_(grads, torch._foreach_sub(list[Tensor](params), list(prior_means)), list(prior))
        return
    torch._foreach_add_(grads, list[Tensor](params), alpha=prior)
    if prior_means:
        torch._foreach_add_(grads, list(prior_means), alpha=-prior)


def groups_of(base: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Groups for a noisy optimizer around `base`: its parameters and learning rates."""
    return [{"params": list(group["params"]), "lr": group["lr"]} for group in base.param_groups]
