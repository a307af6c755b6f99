"""BackPACK as the second provider: per-example gradients and their squares, and second-order diagonals.

BackPACK (Dangel et al. 2020, https://arxiv.org/abs/1912.10985) computes them by one *module extension* per layer type.
`BackpackEngine` calls the extensions of `BatchGrad` and `SumGradSquared` as the rules of their layers. This package's rules
measure the layers that BackPACK does not have, or whose options it silently ignores: BatchNorm in training mode, LayerNorm,
GroupNorm, other padding modes of convolutions, and embeddings, where BackPACK loops over the table in the default dtype.

`SecondOrderEngine` measures the diagonals of the GGN and of the Hessian, which need every operation of the model as a module
(`backpack_modules`) and BackPACK's own hooks. It cannot remove these, they forbid changing a layer's output in place, and
its errors name no module. So `watched` does all this, and raises an error for what BackPACK would skip or overwrite.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from backpack import backpack, extend, extensions
from torch import Tensor, nn

from lightning_bayes.curvature.backpack_modules import AsModules, is_stock, seed_labels
from lightning_bayes.curvature.capture import Capture, refuse_losses
from lightning_bayes.curvature.fused import FusedCapture, HookedEngine
from lightning_bayes.curvature.hooks import HookedCapture
from lightning_bayes.curvature.layer_calls import LayerCall
from lightning_bayes.curvature.layouts import ROWS, LayerOutput
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.measured_modules import MeasuredModule, find_measured_modules, refuse, tied_parameters
from lightning_bayes.curvature.measurement import SecondOrderDiagonal
from lightning_bayes.curvature.private_backpack import hook_handles, is_backpacks, layer_extension, supported_layers
from lightning_bayes.curvature.rules import LayerRule, rule_for
from lightning_bayes.curvature.rules.batch_norm import uses_batch_statistics
from lightning_bayes.curvature.rules.random_numbers import new_seed
from lightning_bayes.curvature.rules.registry import Inputs, PerExample, Squares
from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError, UnsupportedTrainingError
from lightning_bayes.private_torch import BACKWARD_HOOK_KIND

_GRADIENTS, _SQUARES = extensions.BatchGrad(), extensions.SumGradSquared()
_OTHERWISE = "avoid BackPACK: 'squared_gradients' in measure, VOGN, or hessian='reparameterised' in VONCallback"


@final
class BackpackEngine(HookedEngine):
    """Measures per-example squared gradients by BackPACK's rules. Arguments as in `AbstractEngine`."""

    def capture(self) -> AbstractContextManager[Capture]:
        """Measure the passes inside the context; see `AbstractEngine.capture`."""
        return self.run(FusedCapture(self))

    def units(self) -> list[MeasuredModule]:
        """The measured modules, with BackPACK's rule where it has one."""
        return [unit if unit.rule is None else replace(unit, rule=_rule(unit, unit.rule)) for unit in super().units()]


def _rule(unit: MeasuredModule, own: LayerRule) -> LayerRule:
    """BackPACK's rule for a layer if it has one, else this package's rule."""
    if not is_stock(unit.module) or isinstance(unit.module, nn.Embedding) or uses_batch_statistics(unit.module):
        return own
    return replace(own, contributions=_contributions, _fast_squares=_squares, _fast_sums=None)


def _contributions(layer: nn.Module, inputs: Inputs, grad_output: Tensor) -> PerExample:
    return _values(_GRADIENTS, layer, inputs[0], grad_output)


def _squares(layer: nn.Module, inputs: Inputs, grad_output: Tensor, workspace: Workspace, saved: Any = None) -> Squares:
    """Σ_i c_i², of as many examples at a time as fit; a linear layer without positions needs no matrix for each."""
    has_rank_one = isinstance(layer, nn.Linear) and grad_output.dim() == 2
    elements = 1 if has_rank_one else sum(param.numel() for param in layer.parameters())
    total: Squares = {}
    for x, delta in workspace.split(elements, inputs[0], grad_output):
        for name, square in _values(_SQUARES, layer, x, delta).items():
            total[name] = total[name] + square if name in total else square
    return total


def _values(extension: Any, layer: nn.Module, x: Tensor, grad_output: Tensor) -> dict[str, Tensor]:
    """What an extension of BackPACK computes for each parameter of a layer."""
    of_layer, attributes = layer_extension(extension, type(layer)), vars(layer)
    delta = grad_output.clone()  # results may be views of it, and their callers overwrite them
    needed = {"input0": x, "output": delta}  # of the output, only the shape
    users = {name: attributes[name] for name in needed if name in attributes}
    attributes.update(needed)
    try:
        names = [name for name, param in layer.named_parameters() if param.requires_grad]
        return {name: getattr(of_layer, name)(extension, layer, (), (delta,), None) for name in names}
    finally:
        for name in needed:
            del attributes[name]
        attributes.update(users)


@final
class SecondOrderEngine(HookedEngine):
    """Measures one of BackPACK's second-order diagonals."""

    def __init__(
        self,
        model: nn.Module,
        quantity: SecondOrderDiagonal,
        loss_reduction: LossReduction = "auto",
        mc_samples: int = 1,
        seed: int | None = None,
    ) -> None:
        super().__init__(model, loss_reduction)
        self.quantity, self.mc_samples, self.seed = quantity, mc_samples, seed

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Measure one pass inside the context; call the capture's `observe` before backward."""
        extension = self._extension()
        supported = supported_layers(extension)
        self._refuse_unsupported(supported)
        # Frozen layers, too. If one that curvature has to pass through is missing, the check of the next layer fails.
        modules = [MeasuredModule(name, module, rule_for(module)) for name, module in self.model.named_modules()]
        layers = [unit for unit in modules if _is_supported(unit, supported) and not uses_batch_statistics(unit.module)]
        as_modules = AsModules(self.quantity)
        captured = BackpackCapture(self, as_modules)
        hooks = watched(self.model, layers, extension, as_modules, _OTHERWISE)
        with self.run(captured), hooks as captured.squares:
            yield captured

    def _extension(self) -> Any:
        if self.quantity != "diag_ggn_mc":
            return extensions.DiagGGNExact() if self.quantity == "diag_ggn" else extensions.DiagHessian()
        extension = extensions.DiagGGNMC(self.mc_samples)
        seed_labels(extension, self.mc_samples, new_seed() if self.seed is None else self.seed)
        return extension

    def _refuse_unsupported(self, supported: set[type[nn.Module]]) -> None:
        units = find_measured_modules(self.model)
        unsupported = [unit.label for unit in units if not _is_supported(unit, supported)]
        on_batch = [unit.label for unit in units if uses_batch_statistics(unit.module)]
        refuse(
            [
                (f"BackPACK has no rule of {self.quantity} for ", unsupported),
                (f"BackPACK has no {self.quantity} of BatchNorm in training mode: ", on_batch),
                ("BackPACK would overwrite the curvature of tied parameters: ", tied_parameters(units)),
            ],
            f"Replace the layer, freeze it with requires_grad_(False), or {_OTHERWISE}.",
        )


def _is_supported(unit: MeasuredModule, supported: set[type[nn.Module]]) -> bool:
    return is_stock(unit.module) and type(unit.module) in supported


@final
class BackpackCapture(HookedCapture):
    """A capture filled by one of BackPACK's second-order quantities."""

    measure_losses = refuse_losses

    def __init__(self, engine: HookedEngine, as_modules: AsModules) -> None:
        super().__init__(engine)
        self.as_modules = as_modules

    def observe(self, loss: Tensor, divided_by_host: bool = False) -> None:
        """Require also a loss that BackPACK supports; see `Capture.observe`."""
        super().observe(loss, divided_by_host)
        self.as_modules.require_loss(loss, divided_by_host)

    def mean_curvature(self) -> dict[nn.Parameter, Tensor]:
        """The mean of the measured quantity; see `Capture.mean_curvature`."""
        return self.scaled_squares(self.gradient_factor())  # BackPACK's values scale with the loss, like the gradient

    def handle_call(self, call: LayerCall, inputs: list[Any], grads: list[Tensor | None]) -> bool:
        """Leave every call to BackPACK, apart from the check."""
        return True

    def handle_layouts(self, loss: Tensor, outputs: Sequence[LayerOutput]) -> None:
        """Refuse layouts that BackPACK cannot measure, and check the calls; see `Capture.handle_layouts`."""
        for output in outputs:
            if output.layout != ROWS:
                raise ExampleDimensionError(
                    f"{output.unit.label} does not hold the {self.layouts.num_examples} examples of the batch in the rows "
                    "of dimension 0. Keep them there, freeze the layer, or measure squared gradients, which support it."
                )
        super().handle_layouts(loss, outputs)


@contextmanager
def watched(
    model: nn.Module, layers: Sequence[MeasuredModule], extension: Any, as_modules: AsModules, otherwise: str
) -> Iterator[dict[nn.Parameter, Any]]:
    """Run an extension that propagates curvature through `layers`; yields its results by parameter, complete on exit."""
    stored: dict[nn.Parameter, Any] = {}
    called, field = list[str](), extension.savefield
    advice = f"Replace the layer, freeze it with requires_grad_(False), or {otherwise}."
    with ExitStack() as undo:
        for module in (m for m in model.modules() if getattr(m, "inplace", False) is True):
            undo.callback(setattr, module, "inplace", True)
            setattr(module, "inplace", False)  # noqa: B010  # nn.Module declares no such attribute
        for layer in layers:
            before = partial(
                _before_call, layer, called, as_modules, f"Use a separate layer for each call, or {otherwise}."
            )
            undo.callback(layer.module.register_forward_pre_hook(before, with_kwargs=True).remove)
        params = [param for layer in layers for param in layer.module.parameters()]
        undo.callback(lambda: stored.update({p: vars(p).pop(field) for p in params if field in vars(p)}))
        undo.enter_context(_extended([layer.module for layer in layers]))
        undo.enter_context(backpack(extension))
        undo.enter_context(as_modules)
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        undo.enter_context(_errors_named(as_modules.quantity, advice, called))
        yield stored


@contextmanager
def _extended(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Attach BackPACK's hooks to `modules`. On exit, remove them and the attributes that they set."""
    modules = list(modules)
    before = [(part, dict(vars(part))) for module in modules for part in module.modules()]
    handles = hook_handles()
    num_handles = len(handles)
    try:
        with warnings.catch_warnings():
            # torch warns that there are no input gradients; BackPACK does not need them.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            for module in modules:
                extend(module)
            yield
    finally:
        for handle in handles[num_handles:]:
            handle.remove()
        del handles[num_handles:]  # BackPACK itself never deletes a handle
        for module, attributes in before:
            for name in [n for n in vars(module) if is_backpacks(n)]:
                delattr(module, name)
            vars(module).update({n: value for n, value in attributes.items() if is_backpacks(n)})
            setattr(module, BACKWARD_HOOK_KIND, attributes.get(BACKWARD_HOOK_KIND))


def _before_call(
    unit: MeasuredModule,
    called: list[str],
    as_modules: AsModules,
    repeat_advice: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Forward pre-hook: refuse a call that BackPACK would measure wrongly."""
    if not torch.is_grad_enabled():
        return
    if not args:
        raise UnsupportedTrainingError(
            f"{unit.label} is called by keyword, and BackPACK cannot see keyword inputs. Call it as layer(x)."
        )
    if unit.label in called:
        raise UnsupportedLayerError(
            f"{unit.label} is called twice in one pass, and BackPACK would measure only one call. {repeat_advice}"
        )
    if torch.is_autocast_enabled(args[0].device.type):
        raise UnsupportedTrainingError("BackPACK cannot run under autocast. Train in 32-true.")
    called.append(unit.label)
    as_modules.require_known(args[0], unit.label)
    if as_modules.quantity.startswith("kf") and isinstance(module, nn.Linear) and args[0].dim() != 2:
        raise UnsupportedLayerError(
            f"{unit.label} got an input of shape {list(args[0].shape)}, and BackPACK's {as_modules.quantity} supports only "
            "inputs [examples, features] of linear layers. Use engine='fused'."
        )


@contextmanager
def _errors_named(quantity: str, advice: str, called: list[str]) -> Iterator[None]:
    """Name the layer and a remedy in torch's error about an output changed in place, and in BackPACK's errors."""
    try:
        yield
    except (RuntimeError, AssertionError, ValueError) as error:
        if isinstance(error, NotImplementedError) or not isinstance(error, RuntimeError):
            frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            if not any("backpack" in Path(name).parts for name in frames):
                raise
            raise UnsupportedLayerError(
                f"BackPACK cannot measure {quantity} of this model: {str(error).rstrip('.')}. {advice}"
            ) from error
        if "BackwardHookFunction" not in str(error) and "inside a custom Function" not in str(error):
            raise
        where = f", after {called[-1]} was called" if called else ""
        raise UnsupportedTrainingError(
            f"The output of a layer is changed in place (such as `out += x`){where}, which BackPACK's hooks forbid. "
            f"Write `out = out + x`. {advice}"
        ) from error
