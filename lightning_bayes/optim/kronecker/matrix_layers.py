"""The layers of a model whose weight and bias form one matrix."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.factors import has_factors
from lightning_bayes.curvature.measured_modules import MeasuredModule, find_measured_modules
from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.effective import Effective
from lightning_bayes.posteriors import initial_curvature, layer_matrix, layer_tensors
from lightning_bayes.private_torch import own_parameters


@dataclass(frozen=True, eq=False)
class MatrixLayer:
    """A linear layer or a convolution with its parameters."""

    name: str
    module: nn.Module
    params: tuple[nn.Parameter, ...]
    groups: tuple[dict[str, Any], ...]

    @property
    def weight(self) -> nn.Parameter:
        """The weight, whose optimizer state includes the state of the matrix."""
        return self.params[0]

    @property
    def group(self) -> dict[str, Any]:
        """The weight's parameter group."""
        return self.groups[0]

    @property
    def has_bias(self) -> bool:
        """Whether the bias is the last column of the matrix."""
        return len(self.params) > 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of convolution groups, rows and columns of the matrix."""
        groups = _conv_groups(self.module)
        return groups, len(self.weight) // groups, self.weight[0].numel() + self.has_bias

    @property
    def factor_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of S and A; the groups of a convolution are dimension 0."""
        groups, *sides = self.shape
        return [(side, side) if groups == 1 else (groups, side, side) for side in sides]

    def join(self, values: Sequence[Tensor]) -> Tensor:
        """Join tensors shaped like `params` into a matrix; see `layer_matrix`."""
        return layer_matrix(values[0], values[1] if self.has_bias else None, _conv_groups(self.module))

    def split(self, matrix: Tensor) -> list[Tensor]:
        """Split a matrix into tensors shaped like `params`."""
        weight, bias = layer_tensors(matrix, self.weight.shape, self.has_bias)
        return [weight] if bias is None else [weight, bias]


@dataclass(frozen=True)
class LayerPartition:
    """A model's layers with and without a matrix."""

    layers: list[MatrixLayer]
    too_long: dict[str, int]
    others: list[str]

    @cached_property
    def params(self) -> frozenset[nn.Parameter]:
        """The parameters of the layers with a matrix."""
        return frozenset(param for layer in self.layers for param in layer.params)


def partition_layers(
    model: nn.Module,
    param_groups: Iterable[dict[str, Any]],
    *,
    deterministic: Collection[nn.Parameter] = (),
    max_side: float = math.inf,
    can_have_matrix: Callable[[nn.Module], bool] = has_factors,
) -> LayerPartition:
    """Find the layers whose weight and bias are sampled and preconditioned as one matrix."""
    group_of = {p: group for group in param_groups for p in group["params"] if p.requires_grad}
    units = [unit for unit in find_measured_modules(model) if any(p in group_of for p in unit.module.parameters())]
    uses = Counter(p for unit in units for p in unit.module.parameters())
    partition = LayerPartition([], {}, [])
    for unit in units:
        layer = _layer(unit, group_of) if can_have_matrix(unit.module) else None
        if (
            layer is None
            or any(uses[p] > 1 for p in layer.params)
            or len({param in deterministic for param in layer.params}) > 1
        ):
            partition.others.append(unit.name)
        elif max(layer.shape[1:]) > max_side:
            partition.too_long[unit.name] = max(layer.shape[1:])
        else:
            partition.layers.append(layer)
    return partition


def factors_at_precision(layer: MatrixLayer, init_precision: float, hyperparameters: Effective) -> KroneckerProduct:
    """Return factors S = A = c I whose posterior precision is `init_precision`."""
    curvature = initial_curvature(init_precision, **hyperparameters.start_arguments)
    damping = hyperparameters.prior + hyperparameters.noise_damping
    c = math.sqrt(curvature + damping) - math.sqrt(damping)
    eyes = [c * torch.eye(shape[-1]).to(layer.weight) for shape in layer.factor_shapes]
    return KroneckerProduct(*(eye.expand(shape).clone() for eye, shape in zip(eyes, layer.factor_shapes, strict=True)))


def _layer(unit: MeasuredModule, group_of: dict[nn.Parameter, dict[str, Any]]) -> MatrixLayer | None:
    """Return the layer with its trained parameters; None if its weight is not trained."""
    named = own_parameters(unit.module)
    if named["weight"] not in group_of:
        return None
    params = tuple(p for p in (named["weight"], named.get("bias")) if p is not None and p in group_of)
    return MatrixLayer(unit.name, unit.module, params, tuple(group_of[p] for p in params))


def _conv_groups(module: nn.Module) -> int:
    return int(getattr(module, "groups", 1))
