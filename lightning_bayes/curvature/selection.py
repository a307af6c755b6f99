"""Measurement of a subset of a model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.engine import AbstractEngine
from lightning_bayes.curvature.layouts import REENTRANT
from lightning_bayes.curvature.measured_modules import find_measured_modules
from lightning_bayes.curvature.rules import rule_for
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError, UnsupportedTrainingError, name_some
from lightning_bayes.private_torch import has_children, own_parameters, tree_leaves


@contextmanager
def requires_grad_as(flags: Mapping[nn.Parameter, bool]) -> Iterator[None]:
    """Context in which parameters require gradients as `flags` say."""
    saved = {param: param.requires_grad for param in flags}
    try:
        for param, flag in flags.items():
            param.requires_grad_(flag)
        yield
    finally:
        for param, flag in saved.items():
            param.requires_grad_(flag)


@contextmanager
def only_trained(model: nn.Module, names: Collection[str]) -> Iterator[dict[str, nn.Parameter]]:
    """Only the named parameters require gradients inside the context; yields them in the order of the model."""
    trained = {name: param for name, param in model.named_parameters() if name in names}
    chosen = set(trained.values())
    with requires_grad_as({param: param in chosen for param in model.parameters()}):
        yield trained


def require_measured(
    engine: AbstractEngine, captured: Capture, outputs: Tensor, params: dict[str, nn.Parameter]
) -> None:
    """After a forward, require that the outputs depend on every parameter, and only through calls of its layer."""
    if not isinstance(outputs, Tensor):
        raise UnsupportedTrainingError(
            f"{type(engine.model).__name__}.forward returned a {type(outputs).__name__}. Return one tensor: the logits or "
            "means."
        )
    captured.observe(outputs.sum())
    others = set().union(*captured.sizes.values()) - {len(outputs)}
    if others and captured.has_reentrant:
        raise ExampleDimensionError(
            f"A layer sees {min(others)} examples but the outputs have {len(outputs)}. {REENTRANT}"
        )
    if others:
        raise ExampleDimensionError(
            f"A layer sees {min(others)} examples but the outputs have {len(outputs)}, so they cannot be separated. Call "
            "the model once per batch, and keep the examples in dimension 0 of every layer's input."
        )
    units = [unit for unit in find_measured_modules(engine.model) if unit.label in captured.sizes]
    reached = {param for unit in units for param in unit.module.parameters()}
    missed = [name for name, param in params.items() if param not in reached - captured.unmeasured]
    if missed and captured.has_reentrant:
        raise UnsupportedLayerError(f"{missed[0]} cannot be measured. {REENTRANT}")
    if missed:
        raise UnsupportedLayerError(
            f"The outputs do not depend on {missed[0]} through the forward of its own layer, so its curvature cannot be "
            f"measured. Exclude it with subset=... or requires_grad_(False). Parameters: {name_some(missed)}."
        )


def last_called(model: nn.Module, forward: Callable[[], object]) -> str:
    """Name of the module whose trainable parameters the forward uses last; empty for the model itself."""
    uses = _Uses(_parameters_beside_layers(model))
    of_layers = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in uses.owners]
    with ExitStack() as hooks, torch.no_grad(), only_trained(model, of_layers):
        for unit in find_measured_modules(model):
            if isinstance(unit.module, torch.jit.ScriptModule):
                raise UnsupportedLayerError(
                    f"torch.jit has compiled {unit.name or 'the model itself'}, so no hook tells which layer is last. "
                    "Choose other parameters by a regular expression, such as subset='head', or use the original module."
                )
            hooks.enter_context(unit.module.register_forward_hook(lambda *_, name=unit.name: uses.last.append(name)))
        with uses:
            forward()
    if not uses.last:
        raise UnsupportedLayerError(
            f"{type(model).__name__} calls no layer with parameters that require gradients, as after adapters were merged. "
            "Call requires_grad_(True) on the layer whose posterior is wanted."
        )
    return uses.last[-1]


class _Uses(TorchFunctionMode):
    """Notes which module owns the parameters that functions take; layers are noted by hooks."""

    def __init__(self, owners: dict[int, str]) -> None:
        super().__init__()
        self.owners, self.last = owners, list[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # of an attribute such as a shape
            self.last += [self.owners[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self.owners]
        return func(*args, **(kwargs or {}))


def _parameters_beside_layers(model: nn.Module) -> dict[int, str]:
    """Trainable parameters that a module without a rule holds beside its children, by id: the name of that module."""
    return {
        id(param): name
        for name, module in model.named_modules()
        if has_children(module) and rule_for(module) is None and not hasattr(module, "training_step")
        for param in own_parameters(module).values()
        if param is not None and param.requires_grad
    }
