"""BackPACK's hooks on a model: set for a capture, then removed without a trace.

BackPACK's `extend` has no counterpart that undoes it, and its errors name neither the module nor a remedy.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    """Attach BackPACK's hooks to `modules` and take them, and what they store on the modules, off again.

    Args:
        modules: Layers.

    Yields:
        Nothing; the hooks are on inside the context.
    """
    modules = list(modules)
    before = [(part, dict(vars(part))) for module in modules for part in module.modules()]
    handles = hook_handles()
    num_handles = len(handles)
    try:
        with warnings.catch_warnings():
            # BackPACK needs no input gradients; torch tells it that there are none.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            for module in modules:
                extend(module)
            yield
    finally:
        for handle in handles[num_handles:]:
            handle.remove()
        del handles[num_handles:]  # BackPACK itself keeps every handle for ever
        for module, attributes in before:
            for name in [n for n in vars(module) if is_backpacks(n)]:
                delattr(module, name)
            vars(module).update({n: value for n, value in attributes.items() if is_backpacks(n)})
            setattr(module, BACKWARD_HOOK_KIND, attributes.get(BACKWARD_HOOK_KIND))


def without_compiler() -> AbstractContextManager[None]:
    """Run compiled models eagerly: code that was compiled without hooks would not call them, nor forget them later.

    Returns:
        A context manager; it does nothing in torch 2.5, which cannot switch.
    """
    has_switch = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    switch: AbstractContextManager[None] = torch.compiler.set_stance("force_eager") if has_switch else nullcontext()
    return switch


@contextmanager
def out_of_place(model: nn.Module) -> Iterator[None]:
    """Switch the ``inplace`` modules of `model` to run out of place, and back on exit."""
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
    """Watch each call of the units: note its number of examples, and refuse what BackPACK would get wrong.

    Args:
        units: The modules to watch.
        captured: Learns what each unit saw.
        advice: The next step, the last sentence of the messages.

    Yields:
        Nothing.
    """
    handles = [
        unit.module.register_forward_pre_hook(partial(_check_call, unit, captured, advice), with_kwargs=True)
        for unit in units
    ] + [unit.module.register_forward_hook(partial(_note_output, unit, captured), with_kwargs=True) for unit in units]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
            f"{unit.label} is called by keyword, and BackPACK does not see such inputs. Call it as layer(x)."
        )
    if unit.label in captured.sizes:
        raise UnsupportedLayerError(
            f"{unit.label} is called twice in one pass, and BackPACK would keep one call only. {advice}"
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
    captured.outputs.append(LayerOutput.of(unit, rows, dim, tensors))


@contextmanager
def in_place_refused(advice: str, captured: Capture) -> Iterator[None]:
    """Explain torch's error about a layer's output that is changed in place.

    Args:
        advice: The next step, the last sentence of the message.
        captured: Knows which layer was called last, for the message.

    Yields:
        Nothing.

    Raises:
        UnsupportedTrainingError: If a layer's output was changed in place.
        RuntimeError: Any other error of the passes.
    """
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
    """Remove the results that BackPACK stored on the parameters as `savefield`, and return them."""
    return {p: vars(p).pop(savefield) for unit in units for p in unit.module.parameters() if savefield in vars(p)}


def is_stock(module: nn.Module) -> bool:
    """Whether `module` is exactly a layer of torch, with options that BackPACK's own rules know or refuse."""
    return (
        type(module) in STOCK_LAYERS
        and computes(module, type(module).forward)
        and getattr(module, "padding_mode", "zeros") == "zeros"  # it overlooks other modes silently
        and getattr(module, "padding_idx", None) is None
        and not isinstance(getattr(module, "padding", 0), str)
        and not any(getattr(module, "output_padding", ()))
    )
