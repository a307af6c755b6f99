"""The BackPACK engine: `backpack.extensions.SumGradSquared` behind the same interface as the fused engine.

BackPACK (Dangel et al. 2020, https://arxiv.org/abs/1912.10985) is a second opinion that shares no code with our rules.
It returns Σ_i c_i² of the layers it knows. It attaches full backward hooks, which forbid changing a layer's output in
place; modules with an ``inplace`` switch run out of place inside a capture. Whatever it cannot do is refused before or
during the first forward, with the modules' names, because by itself it would skip it silently.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from backpack import backpack, extend
from backpack.extensions import SumGradSquared
from torch import nn

from lightning_bayes.curvature.engine import AbstractEngine, Capture
from lightning_bayes.curvature.units import Unit, find_units
from lightning_bayes.errors import UnsupportedLayerError, UnsupportedTrainingError

_LAYERS = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    nn.Embedding,
)
_FUSED_INSTEAD = "Use engine='fused', which measures it."


class BackpackEngine(AbstractEngine):
    """Measures with BackPACK. Arguments as in `AbstractEngine`."""

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Measure the passes inside the context; hooks and switches are undone on exit.

        Yields:
            The capture; its squares are complete on exit.

        Raises:
            UnsupportedTrainingError: If a layer's output was changed in place.
            RuntimeError: What else went wrong in the passes.
        """
        units = find_units(self.model)
        _check_supported(units)
        captured = Capture(self.loss_reduction)
        with ExitStack() as undo:
            undo.enter_context(warnings.catch_warnings())
            # BackPACK needs no input gradients; torch tells it that there are none.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            undo.enter_context(_out_of_place(self.model))
            undo.enter_context(_extended(units, captured))
            undo.enter_context(backpack(SumGradSquared()))
            try:
                yield captured
            except RuntimeError as error:
                if "BackwardHookFunction" not in str(error):
                    raise
                raise UnsupportedTrainingError(
                    "The output of a layer is changed in place (such as `out += x`), which BackPACK's hooks forbid. "
                    f"Write `out = out + x`. {_FUSED_INSTEAD}"
                ) from error
            finally:
                _collect(units, captured)


def _check_supported(units: list[Unit]) -> None:
    unknown = [unit.label for unit in units if type(unit.module) not in _LAYERS]
    on_batch = [unit.label for unit in units if _uses_batch_statistics(unit.module)]
    owners: dict[nn.Parameter, list[str]] = {}
    for unit in units:
        for name, param in unit.module.named_parameters(prefix=unit.name, recurse=False, remove_duplicate=False):
            owners.setdefault(param, []).append(name)
    reasons = [
        ("BackPACK has no rule for ", unknown),
        ("BackPACK has no per-example gradients of BatchNorm in training mode: ", on_batch),
        (
            "BackPACK would overwrite the squares of tied parameters: ",
            [" = ".join(n) for n in owners.values() if n[1:]],
        ),
    ]
    found = [reason + ", ".join(labels) for reason, labels in reasons if labels]
    if found:
        raise UnsupportedLayerError(f"{'; '.join(found)}. {_FUSED_INSTEAD}")


def _uses_batch_statistics(module: nn.Module) -> bool:
    is_batch_norm = isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
    return is_batch_norm and (module.training or module.running_mean is None)


@contextmanager
def _out_of_place(model: nn.Module) -> Iterator[None]:
    switched: list[Any] = [module for module in model.modules() if getattr(module, "inplace", False) is True]
    for module in switched:
        module.inplace = False
    try:
        yield
    finally:
        for module in switched:
            module.inplace = True


@contextmanager
def _extended(units: list[Unit], captured: Capture) -> Iterator[None]:
    """Attach BackPACK's hooks to the units; BackPACK itself has no way to take them off again."""
    before = [(unit.module, dict(unit.module.__dict__)) for unit in units]
    hooks = [(set(unit.module._forward_hooks), set(unit.module._backward_hooks)) for unit in units]
    handles = [unit.module.register_forward_pre_hook(partial(_check_call, unit, captured)) for unit in units]
    for unit in units:
        extend(unit.module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for (module, attributes), (forward, backward) in zip(before, hooks, strict=True):
            for key in set(module._forward_hooks) - forward:
                del module._forward_hooks[key]
            for key in set(module._backward_hooks) - backward:
                del module._backward_hooks[key]
            for name in ("_backpack_extend", "output", "input0"):
                if name not in attributes:
                    module.__dict__.pop(name, None)
            module._is_full_backward_hook = attributes.get("_is_full_backward_hook")


def _check_call(unit: Unit, captured: Capture, module: nn.Module, args: tuple[Any, ...]) -> None:
    if not torch.is_grad_enabled():
        return
    if unit.label in captured.sizes:
        raise UnsupportedLayerError(
            f"{unit.label} is called twice in one pass, and BackPACK would keep one call only. {_FUSED_INSTEAD}"
        )
    if torch.is_autocast_enabled(args[0].device.type):
        raise UnsupportedTrainingError(f"BackPACK cannot run under autocast. Train in 32-true. {_FUSED_INSTEAD}")
    captured.saw(unit.label, len(args[0]))


def _collect(units: list[Unit], captured: Capture) -> None:
    for unit in units:
        for param in unit.module.parameters():
            if (square := param.__dict__.pop("sum_grad_squared", None)) is not None:
                captured.squares[param] = square
