"""Kronecker factors of every layer of a model, for `measure`."""

from __future__ import annotations

from typing import Literal

from torch import nn

from lightning_bayes.curvature.factors import Request, split_bias
from lightning_bayes.curvature.kronecker import KroneckerCapture, KroneckerEngine
from lightning_bayes.curvature.measured_modules import find_measured_modules, refuse, tied_parameters
from lightning_bayes.curvature.measurement import KroneckerFactors
from lightning_bayes.curvature.rules.random_numbers import new_seed


def request_all_layers(
    engine: KroneckerEngine, source: str, quantity: str, mc_samples: int, seed: int | None
) -> Request:
    """The request that measures every layer; refuse layers without factors and tied parameters."""
    units = find_measured_modules(engine.model)
    refuse(
        [
            (f"{source} has no rule of {quantity} for ", [u.label for u in units if not engine.has_factors(u.module)]),
            (f"{source} would mix the factors of tied parameters: ", tied_parameters(units)),
        ],
        "Replace the layer, freeze it with requires_grad_(False), or measure 'squared_gradients'.",
    )
    layers = {unit.module: _trains_bias(unit.module) for unit in units}
    # BackPACK's KFAC samples its labels itself.
    likelihood: Literal["of_loss"] | None = None if source == "BackPACK" else "of_loss"
    return Request(layers, likelihood, new_seed() if seed is None else seed, mc_samples=mc_samples)


def blocks_by_parameter(captured: KroneckerCapture) -> dict[nn.Parameter, KroneckerFactors]:
    """Separate factors for every trainable weight and bias; see `curvature.factors.conversion`."""
    blocks: dict[nn.Parameter, KroneckerFactors] = {}
    for layer, factors in captured.results().items():
        weight, bias = split_bias(factors) if captured.request.layers[layer] else (factors, None)
        for param, block in ((layer.weight, weight), (layer.bias, bias)):
            if block is not None and isinstance(param, nn.Parameter) and param.requires_grad:
                blocks[param] = block
    return blocks


def _trains_bias(layer: nn.Module) -> bool:
    bias = layer.bias
    return isinstance(bias, nn.Parameter) and bias.requires_grad
