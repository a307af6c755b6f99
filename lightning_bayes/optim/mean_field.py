"""What the mean-field optimizers share: hyperparameters, state (s, m), noise from the old s, the posterior.

Every update is a pure function of one parameter's state and measurement: the paper's, `natural_update`, or the bounded
one of `optim.trust_region`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import (
    DEFAULT_MIB,
    Capture,
    EngineName,
    LossReduction,
    make_engine,
)
from lightning_bayes.errors import HyperparameterError, UnsupportedTrainingError
from lightning_bayes.optim import hyper, trust_region
from lightning_bayes.optim.base import NoisyOptimizer
from lightning_bayes.optim.blocks import blocks
from lightning_bayes.optim.measures import FROM_GRADIENT, BatchSquares, Measure, engine_quantity, reparameterised
from lightning_bayes.optim.noise import CounterNoise
from lightning_bayes.optim.parameters import reference_weights, require_sizes, trainable
from lightning_bayes.optim.state import MeanFieldState, debiased
from lightning_bayes.posteriors import (
    MeanField,
    group_arguments,
    initial_curvature,
    noise_floor,
    precision,
    root_mean_squares,
    state_precision,
    tensor_sizes,
)

StepRule: TypeAlias = Literal["natural", "trust_region"]


class MeanFieldOptimizer(NoisyOptimizer):
    """A mean-field variational optimizer; subclasses fill in the class attributes.

    Class attributes:
        noisy: Whether gradients are taken at samples; False leaves a point, no posterior.
        natural_update: The algorithm's pure, elementwise update.
        measures: What it asks of a pass, see `optim.measures`.
        state_type: Its state: mean, curvature, momentum, and what else the algorithm keeps.
        own_hyperparameters: Names of further group entries that `natural_update` takes.

    Args:
        model: The model whose passes are measured; its layers must be reached by a curvature rule.
        params: Parameters or parameter groups, by default all trainable parameters of `model`.
        lr: Learning rate α of the natural step; with ``step_rule="trust_region"`` the learning rate η of the optimizer
            whose step bounds this one.
        betas: (β₁, β₂), weights of the old momentum and the old curvature.
        num_data: N, number of training examples. Required before the first update.
        prior_precision: δ of the prior N(0, 1/δ).
        kl_weight: τ, weight of the KL term; below 1 is a cold posterior.
        kl_warmup_steps: Updates over which τ grows linearly to `kl_weight`; 0 for none.
        kl_warmup_init: Fraction of `kl_weight` at the start of the warm-up.
        data_augmentation_factor: ρ; the posterior counts Ñ = ρN examples.
        damping: γ, added to the curvature in the preconditioner.
        damping_in_noise: Whether γ counts in the posterior precision too, as in Osawa et al. 2019.
        init_precision: Posterior precision before the first update. None takes the curvature of the first batch, whose
            pass is then free of noise.
        mc_samples: K, weight samples per ``step(closure)``; passes you open yourself are averaged as they come.
        step_rule: ``"natural"``, the papers' step, or ``"trust_region"``, see `optim.trust_region`.
        radius: Whose step bounds the trust region: ``"adam"`` or ``"sgd"``.
        momentum: Momentum of the SGD whose step bounds the trust region.
        relative_noise: κ, an upper bound of the noise in units of each tensor's size (see `noise_floor`); None for none.
        weight_decay: Decoupled weight decay as in AdamW: μ ← (1 - α·wd) μ before the step. Not part of the posterior.
        engine: Curvature engine, ``"fused"`` or ``"backpack"``.
        workspace_mib: Memory in MiB that the engine may fill at once with values of single examples.
        loss_reduction: ``"auto"``, ``"mean"`` or ``"sum"``, see `curvature.measure`.
        seed: Seed of the noise. The global random number generator is not used.
        max_nonfinite_steps: Updates in a row that may be skipped for a gradient or curvature that is not finite.

    Raises:
        HyperparameterError: If a value lies outside of its range, or no parameter is trainable.
        UnsupportedLayerError: If a lazy layer has no size yet.
        UnsupportedTrainingError: If parameters are stored in half precision.
    """

    noisy: ClassVar[bool]
    natural_update: ClassVar[Callable[..., Any]]
    measures: ClassVar[Measure] = "squared_gradients"
    state_type: ClassVar[Any] = MeanFieldState
    own_hyperparameters: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        num_data: int | None = None,
        prior_precision: float = 1.0,
        kl_weight: float = 1.0,
        kl_warmup_steps: int = 0,
        kl_warmup_init: float = 0.1,
        data_augmentation_factor: float = 1.0,
        damping: float = 0.0,
        damping_in_noise: bool = False,
        init_precision: float | None = None,
        mc_samples: int = 1,
        step_rule: StepRule = "natural",
        radius: trust_region.RadiusRule = "adam",
        momentum: float = 0.0,
        relative_noise: float | None = None,
        weight_decay: float = 0.0,
        engine: EngineName = "fused",
        workspace_mib: float = DEFAULT_MIB,
        loss_reduction: LossReduction = "auto",
        seed: int = 0,
        max_nonfinite_steps: int = 10,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "num_data": num_data,
            "prior_precision": prior_precision,
            "kl_weight": kl_weight,
            "kl_warmup_steps": kl_warmup_steps,
            "kl_warmup_init": kl_warmup_init,
            "data_augmentation_factor": data_augmentation_factor,
            "damping": damping,
            "damping_in_noise": damping_in_noise,
            "init_precision": init_precision,
            "step_rule": step_rule,
            "radius": radius,
            "momentum": momentum,
            "relative_noise": relative_noise,
            "weight_decay": weight_decay,
            "noisy": self.noisy,
            "noise_seed": seed,
            "step": 0,
        }
        hyper.check({**defaults, "mc_samples": mc_samples, "max_nonfinite_steps": max_nonfinite_steps})
        require_sizes(model)
        self._reference = reference_weights(model)
        self._scratch: dict[nn.Parameter, Tensor] = {}
        self._batch_squares = BatchSquares()
        super().__init__(
            model,
            make_engine(engine, model, loss_reduction, workspace_mib, quantity=engine_quantity(self.measures)),
            trainable(model) if params is None else params,
            defaults,
            mc_samples=mc_samples,
            max_nonfinite_steps=max_nonfinite_steps,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `torch.optim.Optimizer` does, and create its state, so that a posterior always exists.

        Args:
            param_group: The group.

        Raises:
            UnsupportedTrainingError: If its parameters are stored in half precision.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        hyper.check(group)
        half = {str(p.dtype) for p in group["params"] if p.dtype in {torch.float16, torch.bfloat16}}
        if half:
            raise UnsupportedTrainingError(
                f"Parameters are stored as {', '.join(sorted(half))}, where posterior noise and small updates round to "
                "nothing. Keep them in float32 and train with precision='bf16-mixed' or '16-mixed'."
            )
        for param in group["params"]:
            self._state(param)

    def _state(self, param: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            size = root_mean_squares([self._reference.get(param, param).detach()])[0]
            state["step"] = 0
            for name in self.state_type._fields[1:]:
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["scale"] = torch.where(size > 0, size, torch.ones_like(size))
        return state

    def _sample_(self, noise: CounterNoise, mean: dict[nn.Parameter, Tensor]) -> None:
        for group in self.param_groups:
            for params in self._noisy_cohorts(group):
                kept = [self._buffer(param) for param in params]
                torch._foreach_copy_(kept, list[Tensor](params))
                mean.update(zip(params, kept, strict=True))
                curvatures = [self.state[param]["curvature"] for param in params]
                floors = noise_floor(group, tensor_sizes(kept, [self.state[param]["scale"] for param in params]))
                noise.fill_([param.detach() for param in params])
                for block in blocks(params):
                    inverse_variance = precision(block.join(curvatures), **group_arguments(group))
                    std = inverse_variance.add_(block.spread(floors, params)).rsqrt_()
                    block.write_(params, torch.addcmul(block.join(kept), block.join(params), std))

    def _noisy_cohorts(self, group: dict[str, Any]) -> Iterator[list[nn.Parameter]]:
        """Cohorts of the parameters that have noise now, their curvature started."""
        if group["noisy"]:
            self._require_num_data(group)
            for params in self._cohorts(group):
                if self._start_curvature(params, group):
                    yield params

    def _cohorts(self, group: dict[str, Any]) -> list[list[nn.Parameter]]:
        """The group's trainable parameters, alike in device, dtype and number of updates."""
        alike: dict[Any, list[nn.Parameter]] = {}
        for param in group["params"]:
            if param.requires_grad:
                alike.setdefault((param.device, param.dtype, self._state(param)["step"]), []).append(param)
        return list(alike.values())

    def _buffer(self, param: nn.Parameter) -> Tensor:
        """Memory for one value of `param`: its mean during a pass, its step during an update."""
        buffer = self._scratch.get(param)
        if buffer is None or buffer.device != param.device or buffer.dtype != param.dtype:
            buffer = self._scratch[param] = torch.empty_like(param, requires_grad=False)
        return buffer

    def _start_curvature(self, params: list[nn.Parameter], group: dict[str, Any]) -> bool:
        """Put in the initial precision before the first update; whether there is a curvature."""
        if self.state[params[0]]["step"]:
            return True
        if group["init_precision"] is None:
            return False
        start = initial_curvature(group["init_precision"], **group_arguments(group))
        for param in params:
            self.state[param]["curvature"].fill_(start)
        return True

    @staticmethod
    def _require_num_data(group: dict[str, Any]) -> None:
        if group["num_data"] is None:
            raise HyperparameterError("num_data is not set. Pass num_data=len(training_set).")

    def _update_all(self) -> None:
        for group in self.param_groups:
            self._require_num_data(group)
            for params in self._cohorts(group):
                self._update_cohort(params, group)
            group["step"] += 1

    def _update_cohort(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        # `_measured` has put zeros where backward did not reach.
        measured = [self._passes.curvature[param].contiguous() for param in params]
        states = [self.state[param] for param in params]
        if not self._start_curvature(params, group):
            torch._foreach_copy_([state["curvature"] for state in states], measured)
        for state in states:
            state["step"] += 1
        if group["weight_decay"]:
            torch._foreach_mul_(list[Tensor](params), 1 - group["lr"] * group["weight_decay"])
        if group["step_rule"] == "natural":
            self._natural_step(params, measured, self._hyperparameters(group, states[0]["step"]))
        else:
            self._bounded_step(params, measured, group)

    def _hyperparameters(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        prior = group_arguments(group)
        return {
            "lr": float(group["lr"]),
            "betas": group["betas"],
            "prior": prior["prior_precision"] * prior["kl_weight"] / prior["num_data"],  # δ̃
            "damping": group["damping"],
            "step": step,
            **{name: group[name] for name in self.own_hyperparameters},
        }

    def _natural_step(
        self,
        params: list[nn.Parameter],
        measured: list[Tensor],
        hyper: dict[str, Any],
        steps: list[Tensor] | None = None,
    ) -> None:
        """The algorithm's own update; with `steps` the means stay, and their changes are written there."""
        grads = [param.grad.contiguous() for param in params if param.grad is not None]
        fields = {name: [self.state[param][name] for param in params] for name in self.state_type._fields[1:]}
        for block in blocks(params):
            old = self.state_type(block.join(params), *(block.join(field) for field in fields.values()))
            new = type(self).natural_update(old, block.join(grads), block.join(measured), **hyper)
            if steps is None:
                block.write_(params, new.mean)
            else:
                block.write_(steps, new.mean - old.mean)
            for name, field in fields.items():
                block.write_(field, getattr(new, name))

    def _bounded_step(self, params: list[nn.Parameter], measured: list[Tensor], group: dict[str, Any]) -> None:
        hyper = self._hyperparameters(group, self.state[params[0]]["step"])
        beta1, beta2 = hyper["betas"]
        hyper["betas"] = (beta1, trust_region.weight_of_old(beta2, hyper["step"]))
        lr, hyper["lr"] = hyper["lr"], trust_region.NATURAL_RATE
        steps = [self._buffer(param) for param in params]
        self._natural_step(params, measured, hyper, steps)
        radius: Tensor | float = trust_region.adam_radius(lr)
        if group["radius"] == "sgd":
            sizes = root_mean_squares([self.state[param]["momentum"] for param in params])
            radius = trust_region.sgd_radius(lr, group["momentum"], debiased(sizes, beta1, hyper["step"]))
        trust_region.bounded_step_(params, steps, radius)

    # -- what a pass measures ------------------------------------------------------------------------------------------

    def _curvature_of_pass(self, captured: Capture, loss_scale: float, sample: int) -> dict[nn.Parameter, Tensor]:
        if self.measures == "squared_gradients":
            return super()._curvature_of_pass(captured, loss_scale, sample)
        if self.measures not in FROM_GRADIENT:
            return captured.mean_curvature()  # second-order quantities do not see the loss's scale
        factor = captured.gradient_factor() / loss_scale
        grads = {param: param.grad * factor for _, param in self._trained() if param.grad is not None}
        if self.measures == "reparameterised":
            return {param: self._reparameterised(param, grad, captured.num_examples) for param, grad in grads.items()}
        self._batch_squares.add(sample, captured.num_examples, grads)
        return {}

    def _reparameterised(self, param: nn.Parameter, grad: Tensor, num_examples: float) -> Tensor:
        mean = self.sampled_mean().get(param)
        if mean is None:  # a pass without noise says nothing of the curvature: its magnitude, as if from one example
            return grad.square_().mul_(num_examples)
        group = next(group for group, other in self._trained() if other is param)
        precision_of_pass = state_precision(group, self.state[param], mean)
        assert precision_of_pass is not None
        return reparameterised(grad, param.detach(), mean, precision_of_pass)

    def _measured(self) -> list[Tensor]:
        if self.measures == "batch_square":
            self._passes.curvature.update(self._batch_squares.mean())
            self._batch_squares.clear()
        return super()._measured()

    def _forget_passes(self) -> None:
        super()._forget_passes()
        self._batch_squares.clear()

    # -- posterior ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def posterior(self) -> MeanField:
        """The posterior by the model's parameter names.

        Returns:
            Copies of mean and precision; parameters without noise are among the constants.
        """
        names = {param: name for name, param in self.model.named_parameters()}
        noisy = {}
        for group in self.param_groups:
            for param in (param for params in self._noisy_cohorts(group) for param in params):
                found = state_precision(group, self.state[param], param.detach())
                assert found is not None
                noisy[names[param]] = (param.detach().clone(), found, float(group["prior_precision"]))
        others = {n: v for n, v in self.model.state_dict().items() if n not in noisy and isinstance(v, Tensor)}
        constants = {n: v.detach().clone() for n, v in others.items()}
        return MeanField(
            {n: v[0] for n, v in noisy.items()},
            {n: v[1] for n, v in noisy.items()},
            {n: v[2] for n, v in noisy.items()},
            float(self.param_groups[0]["num_data"]),
            constants,
        )

    @torch.no_grad()
    def floored_share(self) -> Tensor:
        """Share of weights whose noise is set by the relative floor: their curvature alone would allow more than κr.

        Returns:
            A scalar between 0 and 1.
        """
        floored, total = [], 0
        for group, param in self._trained():
            state = self.state[param]
            if group["relative_noise"] is not None and state["step"]:
                floor = noise_floor(group, tensor_sizes([param.detach()], [state["scale"]]))[0]
                floored.append((precision(state["curvature"], **group_arguments(group)) < floor).sum())
                total += param.numel()
        return torch.stack(floored).sum() / total if floored else torch.zeros(())
