"""The engine and kind of K-FAC's factors, and the treatment of layers that the engine does not support.

With ``engine="fused"`` this package measures the KFAC factors of all linear layers and convolutions. All other layers are
mean-field with squared gradients. With ``engine="backpack"`` BackPACK measures the factors of linear layers and of
convolutions without groups that pad with zeros. Constructing an optimizer with other layers that have parameters raises an
error that lists them, unless `unsupported_layers` selects a measurement:

    unsupported_layers="mean_field"     squared gradients
    unsupported_layers="fused"          this package's factors if the layer has them, otherwise squared gradients
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from torch import nn

from lightning_bayes.curvature.factors import has_factors
from lightning_bayes.curvature.kronecker import KroneckerEngine
from lightning_bayes.errors import UnsupportedLayerError, name_some
from lightning_bayes.optim.kronecker.matrix_layers import LayerPartition

UnsupportedLayers: TypeAlias = Literal["refuse", "mean_field", "fused"]


def factor_test(engine: KroneckerEngine, unsupported_layers: UnsupportedLayers) -> Callable[[nn.Module], bool]:
    """Return a function that tells whether a layer has Kronecker factors."""
    return has_factors if unsupported_layers == "fused" else engine.has_factors


def require_factors(model: nn.Module, partition: LayerPartition, engine: KroneckerEngine) -> None:
    """Raise `UnsupportedLayerError` if the engine has no factors for a layer with trainable parameters."""
    modules = {name: model.get_submodule(name) for name in partition.others}
    unsupported = [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in modules.items()
        if not engine.has_factors(module)
    ]
    if unsupported:
        raise UnsupportedLayerError(
            f"BackPACK has no factors for {name_some(unsupported, 160)}. Pass unsupported_layers='mean_field' to use their "
            "squared gradients, unsupported_layers='fused' to use this package's factors where available, or "
            "engine='fused'."
        )
