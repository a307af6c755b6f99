"""Collecting Kronecker factors beside gradients and squares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import KroneckerFactors, Workspace
from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.optim.runtime.passes import PassCollector


class KroneckerPasses(PassCollector):
    """Also averages S and A over passes, each on its own; arguments as in `PassCollector`.

    Attributes:
        factors: S ⊗ A by the layer's weight.
    """

    def __init__(self, workspace: Workspace) -> None:
        super().__init__(workspace)
        self.factors: dict[nn.Parameter, KroneckerProduct] = {}

    def add_factors(self, measured: Mapping[nn.Module, KroneckerFactors], num_examples: float) -> None:
        """Fold the factors of one pass in, before its `add`.

        Args:
            measured: (S, A) by layer.
            num_examples: The pass's number of examples.
        """
        share = num_examples / (self.examples + num_examples)
        new: dict[nn.Parameter, KroneckerProduct] = {}
        for layer, found in measured.items():
            assert isinstance(layer.weight, nn.Parameter)
            new[layer.weight] = KroneckerProduct(*found.factors)
        if share == 1:
            self.factors = new
            return
        for weight in {**self.factors, **new}:  # a layer that a pass did not reach counts as zero
            old, now = self.factors.get(weight), new.get(weight)
            like = now or old
            assert like is not None
            sides = zip(old or _zeros(like), now or _zeros(like), strict=True)
            self.factors[weight] = KroneckerProduct(*(before.lerp(after, share) for before, after in sides))

    def all_tensors(
        self, params: Sequence[nn.Parameter], layers: Sequence[MatrixLayer], measures: bool
    ) -> list[Tensor]:
        """Loss, ĝ and, of an update that measures, ĥ of what is in no matrix, S and A; zeros where nothing was measured.

        Args:
            params: Parameters in an order that all ranks share.
            layers: The layers, alike.
            measures: Whether this update's passes measure.

        Returns:
            The tensors; writing to them changes the means.
        """
        if self.loss is None:
            self.loss = torch.zeros((), device=params[0].device)
        inside = {param for layer in layers for param in layer.params} if measures else set(params)
        every = self.tensors([param for param in params if param not in inside])
        every += [_gradient(param) for param in params if param in inside]
        return every + [side for layer in layers if measures for side in self._of(layer)]

    def clear(self) -> None:
        """Forget all passes."""
        super().clear()
        self.factors = {}

    def _of(self, layer: MatrixLayer) -> KroneckerProduct:
        if layer.weight not in self.factors:
            groups, rows, columns = layer.shape
            lead = () if groups == 1 else (groups,)
            self.factors[layer.weight] = KroneckerProduct(
                layer.weight.new_zeros(*lead, rows, rows), layer.weight.new_zeros(*lead, columns, columns)
            )
        return self.factors[layer.weight]


def _gradient(param: nn.Parameter) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad


def _zeros(like: KroneckerProduct) -> KroneckerProduct:
    return KroneckerProduct(torch.zeros_like(like.left), torch.zeros_like(like.right))
