"""The source of K-FAC's factors: an engine, one of its kinds of factors, and the layers that it has none for.

With ``engine="fused"`` this package measures KFAC's factors of every linear layer and convolution; everything else is
mean-field, measured by its squared gradients. With ``engine="backpack"`` BackPACK measures those of linear layers and of
convolutions without groups that pad with zeros. The one rule for all others that hold parameters: they are refused by name
when the optimizer is built, unless an argument says how to measure them.

    unsupported_layers="mean_field"     by their squared gradients
    unsupported_layers="fused"          by this package's factors where it has them, else by their squared gradients
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from torch import nn

from lightning_bayes.curvature.factors import has_factors
from lightning_bayes.curvature.kronecker import KroneckerEngine
from lightning_bayes.curvature.measurement import KroneckerQuantity
from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError, name_some
from lightning_bayes.optim.kronecker.matrix_layers import Division

UnsupportedLayers: TypeAlias = Literal["refuse", "mean_field", "fused"]


def check_factors(engine: str, factors: str, unsupported_layers: str) -> None:
    """Require factors that the engine measures, and a known rule for the other layers.

    Args:
        engine: ``"fused"`` or ``"backpack"``.
        factors: ``"kfac"``, ``"kflr"`` or ``"kfra"``.
        unsupported_layers: ``"refuse"``, ``"mean_field"`` or ``"fused"``.

    Raises:
        HyperparameterError: If one is unknown, or the engine does not measure the factors.
    """
    given = {"factors": (factors, KroneckerQuantity), "unsupported_layers": (unsupported_layers, UnsupportedLayers)}
    for name, (value, choices) in given.items():
        if value not in get_args(choices):
            raise HyperparameterError(f"{name}={value!r} must be {' or '.join(map(repr, get_args(choices)))}.")
    if engine == "fused" and factors != "kfac":
        raise HyperparameterError(f"engine='fused' does not measure {factors!r}; pass engine='backpack'.")


def layer_rule(engine: KroneckerEngine, unsupported_layers: UnsupportedLayers) -> Callable[[nn.Module], bool]:
    """Whether a layer has a matrix.

    Args:
        engine: The engine.
        unsupported_layers: As in `check_factors`.

    Returns:
        A function of a layer.
    """
    return has_factors if unsupported_layers == "fused" else engine.has_factors


def require_factors(model: nn.Module, division: Division, engine: KroneckerEngine) -> None:
    """Require an engine that has factors for every layer that this package has any rule for.

    Args:
        model: The model.
        division: Its layers.
        engine: The engine.

    Raises:
        UnsupportedLayerError: Listing the layers without.
    """
    modules = {name: model.get_submodule(name) for name in division.others}
    missed = [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in modules.items()
        if not engine.has_factors(module)
    ]
    if missed:
        raise UnsupportedLayerError(
            f"BackPACK has no factors for {name_some(missed, 160)}. Pass unsupported_layers='mean_field' to measure them by "
            "their squared gradients, unsupported_layers='fused' for this package's factors where it has them, or train by "
            "engine='fused'."
        )
