"""The default step of a callback: the user's own optimizer moves the mean, the algorithm shapes the posterior.

A variational method rests where E_q[ĝ] + δ̃ (μ - μ₀) = 0 and s = E_q[ĥ]. The first condition does not depend on what divides
the gradient on the way there, so the metric, the learning rate and the schedule may as well be those that the user has
tuned: gradients are taken at samples, the prior's is added, and the user's Adam, AdamW, SGD or other optimizer steps

    g = ĝ + δ̃ (μ - μ₀)        μ ← user's optimizer (μ, g)

while s is measured and averaged as the algorithm says, from the first batch on: s₁ = ĥ₁ without noise, and

    β₂(t) = min(β₂, (t-1)/t)   a running mean first, a running average later.

Without noise and prior this **is** the user's training, but for a bound of SGD's gradients (below). Paths differ from those
of natural gradients, of course: pass a learning rate for the papers' step.

The prior's gradient is added where somebody asks for a prior: by its precision or mean, or by an L2 penalty. Who asks for
none trains without one, so the mean keeps the flat prior of that training, and the default precision counts in the
posterior's width alone. A prior that nobody has asked for would not be weak: Adam divides by the gradient's size, so that
weights which few examples reach would go to μ₀ at full speed, however small δ̃ is.

A step in proportion to the gradient, such as SGD's, trains at the edge of stability, where a few unlucky samples suffice to
throw the weights out for good: with lr = 0.05 and momentum 0.9 LeNet ended at chance on the digits. There each gradient is
scaled down to at most what, with all of its momentum, moves a tensor by a tenth of its size r: RMS(g) ≤ 0.1 r (1 - m) / lr.
This **heuristic** is kin of You et al. 2017 (https://arxiv.org/abs/1708.03888); early in training and at large learning
rates it acts often, so that SGD is no longer quite the user's.

On small data the posterior of a network is far wider than training survives. The default therefore bounds the noise by a
share κ of each tensor's size (`posteriors.noise_floor`), and its prior is wide: **heuristics**, chosen among a few values on
some seeds of problems of ``python -m benchmarks.defaults``, which measures them (docs/defaults.md). Where the curvature is
the squared gradient of a batch, about 1/M of that of its M examples, every weight has all the noise that κ allows, so it is
smaller there; and with SGD and its kin, since noise makes single gradients large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.steps.step import Cohort, Step
from lightning_bayes.posteriors import root_mean_squares, tensor_sizes

NOISE_OF_CLASSIFIERS = 0.3  # κ; an argmax stands more noise
NOISE_OF_OTHERS = 0.02  # than a number
# Where the bound is all of the noise, or each gradient moves weights by its own size:
CAUTIOUS_NOISE = (0.1, NOISE_OF_OTHERS)
SHALLOW = 5  # layers, LeNet's; deeper networks have less noise
PRIOR_PRECISION = 0.1  # δ of the posterior's width where nobody asks for a prior
LONGEST_MOVE = 0.1  # of a tensor's size, by one gradient of a step in proportion to it
GRADIENT_STEPS = (torch.optim.SGD, torch.optim.ASGD)  # are such steps
STATE_KEY = "base"  # of the base optimizer in the noisy optimizer's state_dict


@final
class BaseOptimizerStep(Step):
    """Steps with another optimizer, whose ``state_dict`` is part of the noisy optimizer's.

    Args:
        base: The user's optimizer, over the same parameters in the same groups.
        cycles_momentum: Whether a scheduler changes the momentum of the noisy optimizer's groups.
    """

    uses_update = False

    def __init__(self, base: torch.optim.Optimizer, cycles_momentum: bool = False) -> None:
        self.base, self.cycles_momentum = base, cycles_momentum

    @property
    def follows_gradients(self) -> bool:
        """Whether the steps are in proportion to the gradient."""
        return isinstance(self.base, GRADIENT_STEPS)

    def apply(self, cohort: Cohort) -> None:
        """Update the curvature of one cohort and leave G in ``param.grad``; see `Step`."""
        cohort.average_(self.weight_of_old(cohort.group["betas"][1], cohort.measurements))
        add_prior_gradient_(cohort.params, cohort.prior_means, cohort.prior * cohort.group["prior_on_mean"])

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
            if self.follows_gradients:
                bound_gradients_(own, states)
        self.base.step()

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


def bound_gradients_(group: Mapping[str, Any], states: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Scale ``param.grad`` down to RMS(g) ≤ 0.1 r (1 - m) / lr, tensor by tensor.

    Args:
        group: Of SGD or its kin.
        states: The noisy optimizer's, with each tensor's ``scale``, its size at the start.
    """
    alike: dict[Any, list[Tensor]] = {}
    for param in group["params"]:
        if param in states and param.grad is not None and group["lr"]:
            alike.setdefault((param.device, param.dtype), []).append(param)
    for params in alike.values():
        sizes = tensor_sizes([param.detach() for param in params], [states[param]["scale"] for param in params])
        grads = [param.grad for param in params if param.grad is not None]
        most = sizes * (LONGEST_MOVE * (1 - group.get("momentum", 0.0)) / group["lr"])
        shares = most / torch.maximum(root_mean_squares(grads), most)  # at most 1
        torch._foreach_mul_(grads, list(shares))


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


def add_prior_gradient_(params: Sequence[nn.Parameter], prior_means: Sequence[Tensor], prior: float) -> None:
    """G ← g + δ̃ (μ - μ₀) in ``param.grad``.

    Args:
        params: Parameters with gradients.
        prior_means: μ₀ of each; empty for zero.
        prior: δ̃; 0 for none.
    """
    if not prior:
        return
    grads = [param.grad for param in params if param.grad is not None]
    torch._foreach_add_(grads, list[Tensor](params), alpha=prior)
    if prior_means:
        torch._foreach_add_(grads, list(prior_means), alpha=-prior)


def groups_of(base: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Groups for a noisy optimizer around `base`: its parameters and learning rates."""
    return [{"params": list(group["params"]), "lr": group["lr"]} for group in base.param_groups]
