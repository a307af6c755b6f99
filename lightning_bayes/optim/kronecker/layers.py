"""Which layers of a model have Kronecker factors: what the engine must support, and what the log says.

With ``engine="fused"`` this package measures the KFAC factors of all linear layers and convolutions. All other layers are
mean-field with squared gradients. With ``engine="backpack"`` BackPACK measures the factors of linear layers and of
convolutions without groups that pad with zeros. Constructing an optimizer with other layers that have parameters raises an
error that lists them, unless `unsupported_layers` selects a measurement:

    unsupported_layers="mean_field"     squared gradients
    unsupported_layers="fused"          this package's factors if the layer has them, otherwise squared gradients
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from lightning_bayes.curvature.kronecker import KroneckerEngine
from lightning_bayes.errors import UnsupportedLayerError, name_some
from lightning_bayes.likelihood import OutputLikelihood
from lightning_bayes.optim.kronecker.matrix_layers import LayerPartition
from lightning_bayes.posteriors import require_memory


def require_supported(partition: LayerPartition, engine: KroneckerEngine) -> None:
    """Raise `UnsupportedLayerError` if BackPACK has no factors for a layer with trainable parameters."""
    modules = {name: engine.model.get_submodule(name) for name in partition.others}
    unsupported = [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in modules.items()
        if not engine.has_factors(module)
    ]
    if unsupported:
        raise UnsupportedLayerError(
            f"BackPACK has no factors for {name_some(unsupported, 160)}. Pass unsupported_layers='mean_field' to use "
            "their squared gradients, unsupported_layers='fused' to use this package's factors where available, or "
            "engine='fused'."
        )


def require_room(partition: LayerPartition, kinds: Collection[str], settings: Mapping[str, Any]) -> None:
    """Require that what is stored of each layer, such as its factors and its inverses, fits into memory."""
    if layers := partition.layers:
        require_memory(
            f"The Kronecker {', '.join(kinds)} of {len(layers)} layers",
            len(kinds) * sum(math.prod(shape) for layer in layers for shape in layer.factor_shapes),
            layers[0].weight.element_size(),
            settings["limit_mib"],
            f"a smaller max_side than {settings['max_side']}",
        )


def description(partition: LayerPartition, likelihood: OutputLikelihood | None, settings: Mapping[str, Any]) -> str:
    """The layers with factors, the labels of the Fisher, and all other layers, for a log."""
    labels = f"drawn from {type(likelihood).__name__} (Fisher)" if likelihood else "from the data (empirical Fisher)"
    if settings["engine"] == "backpack":
        drawn = "drawn from the loss's likelihood" if settings["factors"] == "kfac" else "none"
        labels = f"{drawn} ({settings['factors']} by BackPACK)"
    long = [f"{name} (side {side} > max_side={settings['max_side']})" for name, side in partition.too_long.items()]
    return (
        f"Kronecker factors for {len(partition.layers)} layers, labels {labels}, measured every "
        f"{settings['stats_interval']} and inverted every {settings['inverse_interval']} updates; "
        f"mean-field: {', '.join([*long, *partition.others]) or 'none'}."
    )
