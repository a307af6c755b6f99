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

Without noise and prior this **is** the user's training, except for the bound on SGD's steps (below) and for rounding: on a
CPU torch's own optimizers use their fused kernels (`optim.steps.fused`). For the natural-gradient step of the papers and its
objective, pass a learning rate.

A prior is stated by its precision or mean, or by an L2 penalty. Without a stated prior the mean is unregularised. An
implicit prior would not be weak: Adam divides by the size of the gradient, so weights that few examples reach would move to
μ₀ at full speed, however small δ̃ is. AdamW's decoupled weight decay moves the mean too and is not part of the objective.

**Heuristics**, chosen on some seeds of the problems of ``python -m benchmarks.defaults`` and reported on others
(docs/defaults.md): the temperatures τ_t, which give each tensor noise with a root mean square of κ times its size r_t; κ and
ε by kind of network; and a bound on steps proportional to the gradient, such as SGD's. SGD trains at the edge of stability,
where a few unlucky samples can throw the weights off for good. Its finished step, after all averaging, is shortened to 3 %
of each tensor's size, RMS(Δμ) ≤ 0.03 r, and its momentum by the same factor, as in You et al. 2017
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
from lightning_bayes.optim.steps.step import CohortUpdate, Step
from lightning_bayes.optim.weight_prior import prior_means
from lightning_bayes.posteriors import root_mean_squares, tensor_sizes

NOISE_OF_CLASSIFIERS = 0.07  # κ for classifiers without convolutions
FLATNESS_OF_CLASSIFIERS = 0.001  # ε for classifiers without convolutions
NOISE_OF_CONVOLUTIONS = 0.3  # κ for classifiers with convolutions
FLATNESS_OF_CONVOLUTIONS = 1.0  # ε for classifiers with convolutions
NOISE_OF_NORMALISED = 0.005  # κ for classifiers with normalisation layers
NOISE_OF_REGRESSIONS = 0.01  # κ for regression and unknown losses
SHALLOW = 5  # layers, as in LeNet; deeper networks get less noise
PRIOR_PRECISION = 0.1  # δ for the width of the posterior without a stated prior
LONGEST_MOVE = 0.03  # bound on a step of `GRADIENT_STEPS`, relative to the tensor's size
GRADIENT_STEPS = (torch.optim.SGD, torch.optim.ASGD)  # optimizers whose steps are proportional to the gradient
STATE_KEY = "base"  # key of the base optimizer in the noisy optimizer's state_dict


@final
class BaseOptimizerStep(Step):
    """Moves the means with another optimizer, whose ``state_dict`` is part of the noisy optimizer's.

    Args:
        base: The user's optimizer, over the same parameters in the same groups.
        cycles_momentum: Whether a scheduler changes the momentum in the noisy optimizer's groups.
        grafts: Whether the base optimizer determines only the length of the step, and the natural gradient its direction;
            see `optim.steps.graft`.
    """

    uses_natural_update = False

    def __init__(self, base: torch.optim.Optimizer, cycles_momentum: bool = False, grafts: bool = False) -> None:
        self.base, self.cycles_momentum, self.grafts = base, cycles_momentum, grafts

    @property
    def follows_gradients(self) -> bool:
        """Whether the steps are proportional to the gradient."""
        return isinstance(self.base, GRADIENT_STEPS)

    def apply(self, update: CohortUpdate) -> None:
        """Update the curvature of one cohort, and add the prior's gradient to ``param.grad``; see `Step`."""
        update.average_()
        add_prior_gradient_(update.params, update.states, update.prior_weights())

    def add_group(self, group: Mapping[str, Any], count: int) -> None:
        """Add a later group to the user's optimizer; see `Step`."""
        if count > len(self.base.param_groups):
            self.base.add_param_group({"params": list(group["params"]), "lr": group["lr"]})

    @torch.no_grad()
    def finish(self, groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Move the means with the learning rates of `groups`; see `Step`."""
        for base_group, group in zip(self.base.param_groups, groups, strict=True):
            base_group["lr"] = group["lr"]
            if self.cycles_momentum:
                _copy_momentum(group, base_group)
        starts = copies_before_step(self.base.param_groups, states) if self.follows_gradients or self.grafts else {}
        with fused_on_cpu(self.base):
            self.base.step()
        if self.grafts:
            graft_(groups, starts, states, self.base.state)
        if self.follows_gradients:
            bound_steps_(starts, states, self.base.state)

    def load_state_dict(self, state_dict: Mapping[str, Any], states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Restore the base optimizer.

        Args:
            state_dict: State of the noisy optimizer, including the base optimizer's state under ``base``.
            states: States of the restored noisy optimizer. Files of version 0.1.0.dev0 store the base optimizer's state of
                each parameter there; it is moved to the base optimizer.
        """
        if STATE_KEY in state_dict:
            self.base.load_state_dict(state_dict[STATE_KEY])
        for param, state in states.items():
            if STATE_KEY in state:
                self.base.state[param] = state.pop(STATE_KEY)


def _copy_momentum(group: Mapping[str, Any], base_group: dict[str, Any]) -> None:
    """Copy SGD's momentum, or Adam's β₁, to the group of the base optimizer."""
    if "momentum" in base_group:
        base_group["momentum"] = group["momentum"]
    if "betas" in base_group:
        base_group["betas"] = (group["betas"][0], *base_group["betas"][1:])


def copies_before_step(groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, Any]) -> dict[Tensor, Tensor]:
    """Copies of the parameters that are about to move, if `states` contains them."""
    params = (param for group in groups for param in group["params"])
    return {param: param.detach().clone() for param in params if param in states and param.grad is not None}


def bound_steps_(
    starts: Mapping[Tensor, Tensor],
    states: Mapping[Tensor, Mapping[str, Any]],
    base_states: Mapping[Tensor, dict[str, Any]],
) -> None:
    """Shorten each tensor's step to RMS(Δμ) ≤ 0.03 r, and its momentum by the same factor.

    Args:
        starts: Values before the step, by parameter; overwritten.
        states: States of the noisy optimizer, with each tensor's initial size in ``initial_rms``.
        base_states: States of the base optimizer, with the ``momentum_buffer`` if it uses momentum.
    """
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


def count_noisy_layers(groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, Mapping[str, Any]]) -> int:
    """Count the layers that are trained with noise: tensors with two or more dimensions.

    Args:
        groups: Groups of the noisy optimizer.
        states: Its states.

    Returns:
        L.
    """
    params = (param for group in groups if group["noisy"] for param in group["params"])
    return sum(param.dim() > 1 and param.requires_grad and states[param].get("noisy", True) for param in params)


def noise_of_depth(noise: float, layers: int) -> float:
    """κ for a network with L layers.

    Every layer adds noise of about κ times the size of its output, κ √L in total, so κ √L is kept bounded.

    Args:
        noise: κ for networks with up to five layers.
        layers: L.

    Returns:
        κ √(5 / L) if L is above 5, otherwise κ.

    Example:
        >>> noise_of_depth(0.3, 3), noise_of_depth(0.3, 20)
        (0.3, 0.15)
    """
    return noise * math.sqrt(SHALLOW / max(SHALLOW, layers))


def add_prior_gradient_(
    params: Sequence[nn.Parameter], states: Sequence[Mapping[str, Any]], prior: float | Sequence[Tensor]
) -> None:
    """Add δ̃ (μ - μ₀) to ``param.grad``.

    Args:
        params: Parameters with gradients.
        states: Their optimizer states, with μ₀ unless it is zero.
        prior: δ̃: a number, 0 without a prior; or a tensor per parameter with δ̃ of each weight, which requires μ₀.
    """
    if not prior:
        return
    grads, centres = [param.grad for param in params if param.grad is not None], prior_means(states)
    if not isinstance(prior, (int, float)):
        torch._foreach_addcmul_(grads, torch._foreach_sub(list[Tensor](params), centres), list(prior))
        return
    torch._foreach_add_(grads, list[Tensor](params), alpha=prior)
    if centres:
        torch._foreach_add_(grads, centres, alpha=-prior)


def groups_of(base: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Parameter groups for a noisy optimizer that uses `base`: the same parameters and learning rates."""
    return [{"params": list(group["params"]), "lr": group["lr"]} for group in base.param_groups]
