"""BackPACK's hooks on a model: attached for a capture, then removed completely.

BackPACK cannot undo `extend`, and its errors name neither the module nor a remedy.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from backpack import extend
from torch import Tensor, nn

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.layouts import LayerOutput
from lightning_bayes.curvature.measured_modules import MeasuredModule
from lightning_bayes.curvature.private_backpack import hook_handles, is_backpacks
from lightning_bayes.curvature.rules.packed import is_packed
from lightning_bayes.curvature.rules.registry import computes
from lightning_bayes.errors import UnsupportedLayerError, UnsupportedTrainingError
from lightning_bayes.private_torch import BACKWARD_HOOK_KIND, tree_leaves

STOCK_LAYERS = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    nn.Embedding,
)


@contextmanager
def extended(modules: Iterable[nn.Module]) -> Iterator[None]:
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


def without_compiler() -> AbstractContextManager[None]:
    """Run compiled models eagerly, because code compiled without hooks would not call them. Has no effect in torch 2.5."""
    has_switch = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    switch: AbstractContextManager[None] = torch.compiler.set_stance("force_eager") if has_switch else nullcontext()
    return switch


@contextmanager
def out_of_place(model: nn.Module) -> Iterator[None]:
    """Run the ``inplace`` modules of `model` out of place inside the context."""
    switched: list[Any] = [module for module in model.modules() if getattr(module, "inplace", False) is True]
    for module in switched:
        module.inplace = False
    try:
        yield
    finally:
        for module in switched:
            module.inplace = True


@contextmanager
def calls_checked(units: Iterable[MeasuredModule], captured: Capture, advice: str) -> Iterator[None]:
    """Record the calls of the units in `captured`, and refuse calls that BackPACK would measure wrongly."""
    with ExitStack() as undo:
        for unit in units:
            check, note = partial(_check_call, unit, captured, advice), partial(_note_output, unit, captured)
            undo.callback(unit.module.register_forward_pre_hook(check, with_kwargs=True).remove)
            undo.callback(unit.module.register_forward_hook(note, with_kwargs=True).remove)
        yield


def _check_call(
    unit: MeasuredModule,
    captured: Capture,
    advice: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if not torch.is_grad_enabled():
        return
    if not args:
        raise UnsupportedTrainingError(
            f"{unit.label} is called by keyword, and BackPACK cannot see keyword inputs. Call it as layer(x)."
        )
    if unit.label in captured.sizes:
        raise UnsupportedLayerError(
            f"{unit.label} is called twice in one pass, and BackPACK would measure only one call. {advice}"
        )
    x: Tensor = args[0]
    if torch.is_autocast_enabled(x.device.type):
        raise UnsupportedTrainingError("BackPACK cannot run under autocast. Train in 32-true.")
    if unit.rule is None or is_packed(args):
        unit.require_examples(x)
        captured.note_call(unit.label, len(x))
        return
    inputs = unit.rule.prepare(module, unit.rule.bind(module, args, kwargs))
    unit.require_examples(inputs[0])
    captured.note_call(unit.label, unit.rule.num_examples(module, inputs))


def _note_output(
    unit: MeasuredModule,
    captured: Capture,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    tensors = [value for value in tree_leaves(output) if isinstance(value, Tensor) and value.requires_grad]
    if not tensors:
        return
    dim: int | None = 0
    rows = len(args[0])
    if unit.rule is not None:
        inputs = unit.rule.prepare(module, unit.rule.bind(module, args, kwargs))
        dim, rows = unit.rule.dims(module, inputs)[0], unit.rule.num_examples(module, inputs)
    captured.outputs.append(LayerOutput(unit, rows, dim, tensors))


@contextmanager
def in_place_refused(advice: str, captured: Capture) -> Iterator[None]:
    """Replace torch's error about a layer output that was changed in place by one that names the layer."""
    try:
        yield
    except RuntimeError as error:
        if "BackwardHookFunction" not in str(error) and "inside a custom Function" not in str(error):
            raise
        labels = list(captured.sizes)
        where = f", after {labels[-1]} was called" if labels else ""
        raise UnsupportedTrainingError(
            f"The output of a layer is changed in place (such as `out += x`){where}, which BackPACK's hooks forbid. "
            f"Write `out = out + x`. {advice}"
        ) from error


def collect(units: Iterable[MeasuredModule], savefield: str) -> dict[nn.Parameter, Any]:
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
