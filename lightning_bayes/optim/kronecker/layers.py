"""The layers of a model with Kronecker factors, and the request that measures them.

With ``engine="fused"`` this package measures the KFAC factors of all linear layers and convolutions. All other layers are
mean-field with squared gradients. With ``engine="backpack"`` BackPACK measures the factors of linear layers and of
convolutions without groups that pad with zeros. Constructing an optimizer with other layers that have parameters raises an
error that lists them, unless `unsupported_layers` selects a measurement:

    unsupported_layers="mean_field"     squared gradients
    unsupported_layers="fused"          this package's factors if the layer has them, otherwise squared gradients
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, final

from torch import nn

from lightning_bayes.curvature.factors import Request, has_factors
from lightning_bayes.curvature.kronecker import KroneckerEngine
from lightning_bayes.errors import UnsupportedLayerError, name_some
from lightning_bayes.likelihood import OutputLikelihood
from lightning_bayes.optim.fisher import label_source
from lightning_bayes.optim.kronecker.layer import KroneckerLayer
from lightning_bayes.optim.kronecker.matrix_layers import LayerPartition, partition_layers
from lightning_bayes.posteriors import require_memory

if TYPE_CHECKING:
    from lightning_bayes.optim.variational import VariationalOptimizer


@final
class KroneckerLayers:
    """The partition of a model into layers with and without Kronecker factors."""

    def __init__(self, optimizer: VariationalOptimizer) -> None:
        self._optimizer, self._settings = optimizer, optimizer.arguments
        self._is_measured_by_backpack = self._settings["engine"] == "backpack"
        self._cached: tuple[Any, LayerPartition, list[KroneckerLayer]] | None = None  # with its key

    @property
    def engine(self) -> KroneckerEngine:
        """The optimizer's engine."""
        assert isinstance(self._optimizer.engine, KroneckerEngine)
        return self._optimizer.engine

    def partition(self) -> LayerPartition:
        """The current partition. It changes when parameters are frozen, unfrozen or added."""
        return self._current()[0]

    def with_factors(self) -> list[KroneckerLayer]:
        """The current layers with Kronecker factors."""
        return self._current()[1]

    def params(self) -> frozenset[nn.Parameter]:
        """The parameters of these layers."""
        return self.partition().params

    def _current(self) -> tuple[LayerPartition, list[KroneckerLayer]]:
        groups = self._optimizer.param_groups
        # The key contains ids, because loading a state creates new groups.
        key = [(id(group), [param.requires_grad for param in group["params"]]) for group in groups]
        if self._cached is None or self._cached[0] != key:
            uses_our_rules = self._settings["unsupported_layers"] == "fused"
            partition = partition_layers(
                self._optimizer.model,
                groups,
                deterministic=self._optimizer.deterministic,
                max_side=self._settings["max_side"],
                can_have_matrix=has_factors if uses_our_rules else self.engine.has_factors,
            )
            self._cached = key, partition, [KroneckerLayer(layer, self._optimizer) for layer in partition.layers]
        return self._cached[1:]

    def check(self) -> None:
        """Require that the engine supports every layer, and that factors, inverses and roots fit into memory."""
        if self._settings["unsupported_layers"] == "refuse" and self._is_measured_by_backpack:
            self._require_supported()
        layers = self.partition().layers
        if layers:
            stored = {"factors": True, "inverses": self._optimizer.base_step is None, "roots": self._optimizer.noisy}
            kinds = [kind for kind, is_stored in stored.items() if is_stored]
            require_memory(
                f"The Kronecker {', '.join(kinds)} of {len(layers)} layers",
                len(kinds) * sum(math.prod(shape) for layer in layers for shape in layer.factor_shapes),
                layers[0].weight.element_size(),
                self._settings["limit_mib"],
                f"a smaller max_side than {self._settings['max_side']}",
            )

    def _require_supported(self) -> None:
        """Raise `UnsupportedLayerError` if BackPACK has no factors for a layer with trainable parameters."""
        modules = {name: self._optimizer.model.get_submodule(name) for name in self.partition().others}
        unsupported = [
            f"{name or 'the model itself'} ({type(module).__name__})"
            for name, module in modules.items()
            if not self.engine.has_factors(module)
        ]
        if unsupported:
            raise UnsupportedLayerError(
                f"BackPACK has no factors for {name_some(unsupported, 160)}. Pass unsupported_layers='mean_field' to use "
                "their squared gradients, unsupported_layers='fused' to use this package's factors where available, or "
                "engine='fused'."
            )

    def request(self, label_seed: int, loss_scale: float) -> Request:
        """What a pass measures."""
        layers = {layer.module: layer.has_bias for layer in self.partition().layers}
        labels = self._likelihood() if self._draws_labels() else None
        return Request(layers, labels, label_seed, loss_scale, loops=labels is None)

    def _likelihood(self) -> OutputLikelihood | None:
        """The likelihood to sample labels from; None uses the labels of the data."""
        return label_source(self._settings["fisher"], self._settings["likelihood"], self._optimizer.model)

    def _draws_labels(self) -> bool:
        """Whether this package's rules measure any parameter. BackPACK samples its own labels."""
        if not self._is_measured_by_backpack:
            return True
        layers = [layer for layer in self.partition().layers if self.engine.has_factors(layer.module)]
        by_backpack = {param for layer in layers for param in layer.params}
        return any(param not in by_backpack for _, param in self._optimizer.trained())

    def describe(self) -> str:
        """The layers with factors, the labels of the Fisher, and all other layers, for a log."""
        partition, settings = self.partition(), self._settings
        long = [f"{name} (side {side} > max_side={settings['max_side']})" for name, side in partition.too_long.items()]
        others = ", ".join([*long, *partition.others]) or "none"
        name = self._optimizer.__class__.__name__  # type() would return the type of the weak reference
        return (
            f"{name}: Kronecker factors for {len(partition.layers)} layers, labels {self._describe_labels()}, "
            f"measured every {settings['stats_interval']} and inverted every {settings['inverse_interval']} updates; "
            f"mean-field: {others}."
        )

    def _describe_labels(self) -> str:
        if self._is_measured_by_backpack:
            drawn = "drawn from the loss's likelihood" if self._settings["factors"] == "kfac" else "none"
            return f"{drawn} ({self._settings['factors']} by BackPACK)"
        likelihood = self._likelihood()
        return f"drawn from {type(likelihood).__name__} (Fisher)" if likelihood else "from the data (empirical Fisher)"
