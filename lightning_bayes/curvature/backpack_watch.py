"""A pass with BackPACK's second-order extensions: hooks, functions as modules, and errors that name the module."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from backpack import backpack
from torch import Tensor, nn

from lightning_bayes.curvature.capture import Capture, refuse_losses
from lightning_bayes.curvature.hooks import calls_checked, extended, in_place_refused, out_of_place
from lightning_bayes.curvature.measured_modules import MeasuredModule
from lightning_bayes.curvature.modules import AsModules
from lightning_bayes.errors import UnsupportedLayerError


@final
class BackpackCapture(Capture):
    """A capture filled by BackPACK."""

    def measure_losses(self, losses: Tensor) -> None:
        """Refuse per-example losses; see `Capture.measure_losses`."""
        refuse_losses()


@contextmanager
def watched(
    model: nn.Module,
    layers: Sequence[MeasuredModule],
    extension: Any,
    as_modules: AsModules,
    captured: Capture,
    otherwise: str,
) -> Iterator[None]:
    """Measure the passes inside with a BackPACK extension: `layers` propagate curvature; `captured` records their calls."""
    advice = f"Replace the layer, freeze it with requires_grad_(False), or {otherwise}."
    with ExitStack() as undo:
        undo.enter_context(out_of_place(model))
        undo.enter_context(calls_checked(layers, captured, f"Use a separate layer for each call, or {otherwise}."))
        for layer in layers:
            hook = partial(_check_source, layer, as_modules)
            undo.callback(layer.module.register_forward_pre_hook(hook).remove)
        undo.enter_context(extended([layer.module for layer in layers]))
        undo.enter_context(backpack(extension))
        undo.enter_context(in_place_refused(advice, captured))
        undo.enter_context(as_modules)
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        undo.enter_context(_backpack_errors_named(as_modules.quantity, advice))
        yield


def _check_source(layer: MeasuredModule, as_modules: AsModules, module: nn.Module, args: tuple[Any, ...]) -> None:
    if not torch.is_grad_enabled():
        return
    as_modules.require_known(args[0], layer.label)
    if as_modules.quantity.startswith("kf") and isinstance(module, nn.Linear) and args[0].dim() != 2:
        raise UnsupportedLayerError(
            f"{layer.label} got an input of shape {list(args[0].shape)}, and BackPACK's {as_modules.quantity} supports only "
            "inputs [examples, features] of linear layers. Use engine='fused'."
        )


@contextmanager
def _backpack_errors_named(quantity: str, advice: str) -> Iterator[None]:
    try:
        yield
    except (NotImplementedError, AssertionError, ValueError) as error:
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if not any("backpack" in Path(name).parts for name in frames):
            raise
        raise UnsupportedLayerError(
            f"BackPACK cannot measure {quantity} of this model: {str(error).rstrip('.')}. {advice}"
        ) from error
