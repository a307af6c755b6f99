"""K-FAC and Noisy K-FAC as optimizers: layers' matrices in linear layers and convolutions, VOGN in all others.

The step of the matrices is the papers' one (`optim.kronecker.kfac`), or the bounded one of `optim.steps.trust_region`,
tensor by tensor, or that of the user's optimizer (`optim.steps.base_optimizer`), for which only the posterior is K-FAC's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.diagonal.vogn import update as vogn_update
from lightning_bayes.optim.hyperparameters import effective
from lightning_bayes.optim.kronecker import matrix_state
from lightning_bayes.optim.kronecker.kl_clip import clipped_lr
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.optim.kronecker.matrix_optimizer import MatrixOptimizer
from lightning_bayes.optim.steps import trust_region
from lightning_bayes.optim.steps.base_optimizer import UserStep, add_prior_gradient_


class Move(NamedTuple):
    """Where parameters go, at the learning rate 1."""

    params: list[nn.Parameter]
    steps: list[Tensor]
    group: dict[str, Any]
    number: int  # of their update, from 1
    norm: Tensor  # vᵀ F v


class KroneckerOptimizer(MatrixOptimizer):
    """Moves the means; arguments as in `MatrixOptimizer`."""

    averages_curvature = True

    def _update_all(self) -> None:
        for group in self.param_groups:
            effective(group)  # N must be known
        measures, layers = self._measures_now(), self._layers()
        if measures:
            for layer in layers:
                self._average_factors(layer)
        delays = [turn * self.inverse_interval // len(layers) for turn in range(len(layers))]
        self._invert(
            [layer for layer, delay in zip(layers, delays, strict=True) if self._is_due(layer, delay, measures)]
        )
        if self.user_step is None:
            self._step(layers, measures)
        else:
            self._step_with(self.user_step, layers, measures)
        self._count_update()

    def _step(self, layers: list[MatrixLayer], measures: bool) -> None:
        """The algorithm's own step."""
        moves = [move for layer in layers for move in self._layer_moves(layer)]
        for group in self.param_groups:
            moves += [self._other_move(params, group, measures) for params in self._cohorts(group)]
        clip = self._clip(moves)
        for move in moves:
            self._apply(move, clip)

    def _step_with(self, user: UserStep, layers: list[MatrixLayer], measures: bool) -> None:
        """The step of the user's optimizer, see `optim.steps`; what was measured shapes the posterior alone."""
        every = [(list(layer.params), layer.group) for layer in layers]
        for group in self.param_groups:
            for params in self._cohorts(group):
                every.append((params, group))
                if measures:
                    self._average_squares(params, group)
        for params, group in every:
            prior = effective(group).prior * group["prior_on_mean"]
            add_prior_gradient_(params, self._prior_means(params), prior)
            for param in params:
                self.state[param]["step"] += 1
        user.step(self.param_groups, self.state)

    def _average_squares(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        curvatures = [self.state[param]["curvature"] for param in params]
        measured = [self._passes.curvature[param] for param in params]
        self._start_curvature(params, group)
        torch._foreach_lerp_(curvatures, measured, 1 - self._weight_of_old(self.state[params[0]], group))
        for param in params:
            self.state[param]["measurements"] += 1

    def _layer_moves(self, layer: MatrixLayer) -> Iterator[Move]:
        states = [self.state[param] for param in layer.params]
        centred, prior_means = layer.matrix(layer.params).detach(), self._prior_means(list(layer.params))
        if prior_means:
            centred = centred - layer.matrix(prior_means)
        for state in states:
            state["step"] += 1
        step = states[0]["step"]
        momentum, corrected, direction = matrix_state.move(
            states[0],
            centred,
            layer.matrix([state["momentum"] for state in states]),
            layer.matrix([param.grad for param in layer.params if param.grad is not None]),
            beta=layer.group["betas"][0],
            prior=effective(layer.group).prior,
            step=step,
        )
        norms = layer.tensors(direction * corrected)
        for state, new in zip(states, layer.tensors(momentum), strict=True):
            state["momentum"] = new
        for param, group, part, norm in zip(layer.params, layer.groups, layer.tensors(direction), norms, strict=True):
            yield Move([param], [part.neg()], group, step, norm.sum())

    def _other_move(self, params: list[nn.Parameter], group: dict[str, Any], measures: bool) -> Move:
        states = [self.state[param] for param in params]
        curvatures = [state["curvature"] for state in states]
        has_started = self._start_curvature(params, group)
        measured = [self._passes.curvature[param].contiguous() for param in params] if measures else curvatures
        if measures and not has_started:
            torch._foreach_copy_(curvatures, measured)
        arguments = self._update_arguments(group, states[0]["step"] + 1)
        arguments |= {"lr": 1.0, "betas": (group["betas"][0], self._weight_of_old(states[0], group))}
        steps = [self._buffer(param) for param in params]
        self._natural_step(params, measured, arguments, steps)
        for state in states:
            state["step"] += 1
            state["measurements"] += measures
        damping = arguments["prior"] + arguments["damping"]
        norms = [(step.square() * (s + damping)).sum() for step, s in zip(steps, curvatures, strict=True)]
        return Move(params, steps, group, states[0]["step"], torch.stack(norms).sum())

    def _update_arguments(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        arguments = super()._update_arguments(group, step)
        del arguments["kl_clip"]  # of the whole step
        return arguments

    def _clip(self, moves: list[Move]) -> float:
        """The share of the step that the bound of its Fisher norm leaves."""
        bound = self.param_groups[0]["kl_clip"]
        if bound is None:
            return 1.0
        device = moves[0].norm.device
        norm = torch.stack([move.norm.to(device) * self._rate(move.group) ** 2 for move in moves]).sum()
        return float(clipped_lr(1.0, norm, bound))

    def _rate(self, group: dict[str, Any]) -> float:
        return trust_region.NATURAL_RATE if group["step_rule"] == "trust_region" else float(group["lr"])

    def _apply(self, move: Move, clip: float) -> None:
        params, group = move.params, move.group
        if group["weight_decay"]:
            torch._foreach_mul_(list[Tensor](params), 1 - group["lr"] * group["weight_decay"])
        torch._foreach_mul_(move.steps, self._rate(group) * clip)
        if group["step_rule"] == "trust_region":
            trust_region.bounded_step_(params, move.steps, self._radius(params, group, move.number))
        else:
            torch._foreach_add_(list[Tensor](params), move.steps)


@final
class KFAC(KroneckerOptimizer):
    """K-FAC (`optim.kronecker.kfac`) as a `torch.optim.Optimizer`, without noise; arguments as in `KroneckerOptimizer`.

    It leaves a point, no posterior: the baseline of Zhang et al. 2018, and what to tune before noise is switched on.
    """

    noisy = False
    default_step = "trust_region"  # the user's own step would be all there is
    natural_update = staticmethod(vogn_update)


@final
class NoisyKFAC(KroneckerOptimizer):
    """Noisy K-FAC (`optim.kronecker.noisy_kfac`) as a `torch.optim.Optimizer`; arguments as in `KroneckerOptimizer`.

    Example:
        >>> import torch
        >>> model, x, y = torch.nn.Linear(2, 1), torch.ones(4, 2), torch.zeros(4, 1)
        >>> opt = NoisyKFAC(model, lr=0.1, num_data=4)
        >>> for _ in range(3):
        ...     with opt.sampled_params():
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...     opt.step()
        >>> [factor.shape for factor in opt.posterior().factors["weight"]]  # the bias is a column of the matrix
        [torch.Size([1, 1]), torch.Size([3, 3])]
    """

    noisy = True
    natural_update = staticmethod(vogn_update)
