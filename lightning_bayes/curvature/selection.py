"""The choice of a model's measured parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.engine import AbstractEngine
from lightning_bayes.curvature.measured_modules import find_measured_modules
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError, name_some


@contextmanager
def only_trained(model: nn.Module, names: Collection[str]) -> Iterator[dict[str, nn.Parameter]]:
    """Inside, the named parameters alone require gradients: layers below the first of them keep no graph.

    Args:
        model: The model.
        names: Names of parameters.

    Yields:
        The parameters by name, in the order of the model.
    """
    own = [(param, param.requires_grad) for param in model.parameters()]
    chosen = {name: param for name, param in model.named_parameters() if name in names}
    try:
        for param, _ in own:
            param.requires_grad_(False)
        for param in chosen.values():
            param.requires_grad_(True)
        yield chosen
    finally:
        for param, required in own:
            param.requires_grad_(required)


def require_measured(
    engine: AbstractEngine, captured: Capture, outputs: Tensor, params: dict[str, nn.Parameter]
) -> None:
    """Require that the outputs depend on every parameter, and through the calls of its layer alone.

    Args:
        engine: The engine.
        captured: The pass, with its forward done.
        outputs: The model's outputs, with their graph.
        params: The parameters by name.

    Raises:
        UnsupportedLayerError: Listing those for which this does not hold.
        ExampleDimensionError: If a layer sees other examples than the outputs have.
    """
    captured.observe(outputs.sum())
    others = set().union(*captured.sizes.values()) - {len(outputs)}
    if others:
        raise ExampleDimensionError(
            f"A layer sees {min(others)} examples where the outputs have {len(outputs)}, so they cannot be told apart. Call "
            "the model once for a batch, and keep the examples in dimension 0 of every layer's input."
        )
    called, beside = set(captured.calls_of), engine.used_beside_layers(captured)
    reached = {
        p for unit in find_measured_modules(engine.model) if unit.label in called for p in unit.module.parameters()
    }
    missed = [name for name, param in params.items() if param not in reached or param in beside]
    if missed:
        raise UnsupportedLayerError(
            f"The outputs do not depend on {missed[0]} through the forward of its own layer, so its curvature cannot be "
            f"measured. Leave it out by subset=... or requires_grad_(False). Parameters: {name_some(missed)}."
        )


def last_called(model: nn.Module, inputs: object) -> str:
    """Name of the last layer with trainable parameters that a forward calls.

    Args:
        model: The model.
        inputs: Its input.

    Returns:
        The name; empty for a model that is one layer.

    Raises:
        UnsupportedLayerError: If no such layer is called.
    """
    called: list[str] = []
    hooks = [
        unit.module.register_forward_hook(lambda *_, name=unit.name: called.append(name))
        for unit in find_measured_modules(model)
    ]
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if not called:
        raise UnsupportedLayerError(f"{type(model).__name__} calls no layer with parameters that require gradients.")
    return called[-1]
