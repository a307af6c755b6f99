"""Measurement of a subset of a model's parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.engine import AbstractEngine
from lightning_bayes.curvature.measured_modules import find_measured_modules
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError, UnsupportedTrainingError, name_some


@contextmanager
def only_trained(model: nn.Module, names: Collection[str]) -> Iterator[dict[str, nn.Parameter]]:
    """Only the named parameters require gradients inside the context; yields them in the order of the model."""
    saved = [(param, param.requires_grad) for param in model.parameters()]
    trained = {name: param for name, param in model.named_parameters() if name in names}
    try:
        for param, _ in saved:
            param.requires_grad_(False)
        for param in trained.values():
            param.requires_grad_(True)
        yield trained
    finally:
        for param, requires_grad in saved:
            param.requires_grad_(requires_grad)


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
    if others:
        raise ExampleDimensionError(
            f"A layer sees {min(others)} examples but the outputs have {len(outputs)}, so they cannot be separated. Call "
            "the model once per batch, and keep the examples in dimension 0 of every layer's input."
        )
    units = [unit for unit in find_measured_modules(engine.model) if unit.label in captured.sizes]
    reached = {param for unit in units for param in unit.module.parameters()}
    missed = [name for name, param in params.items() if param not in reached - captured.unmeasured]
    if missed:
        raise UnsupportedLayerError(
            f"The outputs do not depend on {missed[0]} through the forward of its own layer, so its curvature cannot be "
            f"measured. Exclude it with subset=... or requires_grad_(False). Parameters: {name_some(missed)}."
        )


def last_called(model: nn.Module, inputs: object) -> str:
    """Name of the last layer with trainable parameters that the forward calls; empty for the model itself."""
    called: list[str] = []
    with ExitStack() as hooks, torch.no_grad():
        for unit in find_measured_modules(model):
            hooks.enter_context(unit.module.register_forward_hook(lambda *_, name=unit.name: called.append(name)))
        model(inputs)
    if not called:
        raise UnsupportedLayerError(f"{type(model).__name__} calls no layer with parameters that require gradients.")
    return called[-1]
