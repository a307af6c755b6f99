"""BackPACK's hooks on a model, attached for a capture, then removed completely; for its second-order quantities.

BackPACK cannot undo `extend`, its hooks forbid changing a layer's output in place, and its errors name neither the module
nor a remedy. So modules with an ``inplace`` option run out of place, and what it would skip or overwrite raises an error.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from backpack import backpack, extend
from torch import Tensor, nn

from lightning_bayes.curvature.backpack_modules import AsModules
from lightning_bayes.curvature.capture import refuse_losses
from lightning_bayes.curvature.fused import HookedEngine
from lightning_bayes.curvature.hooks import HookedCapture
from lightning_bayes.curvature.layer_calls import LayerCall
from lightning_bayes.curvature.layouts import ROWS, LayerOutput
from lightning_bayes.curvature.measured_modules import MeasuredModule
from lightning_bayes.curvature.private_backpack import hook_handles, is_backpacks
from lightning_bayes.curvature.rules.registry import computes
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError, UnsupportedTrainingError
from lightning_bayes.private_torch import BACKWARD_HOOK_KIND

STOCK_LAYERS = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    nn.Embedding,
)


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
    called: list[str] = []
    advice = f"Replace the layer, freeze it with requires_grad_(False), or {otherwise}."
    with ExitStack() as undo:
        undo.enter_context(_out_of_place(model))
        for layer in layers:
            before = partial(
                _before_call, layer, called, as_modules, f"Use a separate layer for each call, or {otherwise}."
            )
            undo.callback(layer.module.register_forward_pre_hook(before, with_kwargs=True).remove)
        undo.callback(lambda: stored.update(_collected(layers, extension.savefield)))
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


@contextmanager
def _out_of_place(model: nn.Module) -> Iterator[None]:
    """Run the ``inplace`` modules of `model` out of place inside the context."""
    switched: list[Any] = [module for module in model.modules() if getattr(module, "inplace", False) is True]
    for module in switched:
        module.inplace = False
    try:
        yield
    finally:
        for module in switched:
            module.inplace = True


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
    except RuntimeError as error:
        if isinstance(error, NotImplementedError):
            _raise_named(error, quantity, advice)
        if "BackwardHookFunction" not in str(error) and "inside a custom Function" not in str(error):
            raise
        where = f", after {called[-1]} was called" if called else ""
        raise UnsupportedTrainingError(
            f"The output of a layer is changed in place (such as `out += x`){where}, which BackPACK's hooks forbid. "
            f"Write `out = out + x`. {advice}"
        ) from error
    except (AssertionError, ValueError) as error:
        _raise_named(error, quantity, advice)


def _raise_named(error: Exception, quantity: str, advice: str) -> NoReturn:
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if not any("backpack" in Path(name).parts for name in frames):
        raise error
    raise UnsupportedLayerError(
        f"BackPACK cannot measure {quantity} of this model: {str(error).rstrip('.')}. {advice}"
    ) from error


def _collected(units: Iterable[MeasuredModule], savefield: str) -> dict[nn.Parameter, Any]:
    """Remove and return the results that BackPACK stored on the parameters as `savefield`."""
    return {p: vars(p).pop(savefield) for unit in units for p in unit.module.parameters() if savefield in vars(p)}


def is_stock(module: nn.Module) -> bool:
    """Whether `module` is exactly a torch layer whose options BackPACK's own rules support or refuse."""
    return (
        type(module) in STOCK_LAYERS
        and computes(module, type(module).forward)
        and getattr(module, "padding_mode", "zeros") == "zeros"  # BackPACK silently ignores other modes
        and getattr(module, "padding_idx", None) is None
        and not isinstance(getattr(module, "padding", 0), str)
        and not any(getattr(module, "output_padding", ()))
    )
