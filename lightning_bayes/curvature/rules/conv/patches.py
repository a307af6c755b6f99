"""Sums for small or grouped convolutions: c_i(W) = Σ_t δ_it x̃_itᵀ of many examples at once, by batched products."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.curvature.rules.conv.shape import ConvShape
from lightning_bayes.curvature.rules.conv.windows import (
    VECTOR,
    Conv,
    assembled,
    goes_by_rows,
    patch_elements,
    patch_parts,
)
from lightning_bayes.curvature.workspace import Workspace


def suits(shape: ConvShape, device: torch.device) -> bool:
    """Always: this strategy supports every convolution on every device."""
    return True


def sums(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i(W) and Σ_i c_i(W)²; see `plan.WeightSums`."""
    by_rows = goes_by_rows(layer, grad_output.shape[2:])
    elements = max(patch_elements(layer, x, grad_output, by_rows), layer.weight.numel())
    totals: tuple[Tensor, Tensor] | None = None
    for x_part, grad_part in workspace.split(elements, x, grad_output):
        parts = patch_parts(layer, x_part, grad_part, by_rows, workspace)
        delta = torch.unflatten(grad_part.flatten(2), 1, (layer.groups, -1))
        grad, square = _at_once(delta, parts, workspace)
        totals = (grad, square) if totals is None else (totals[0].add_(grad), totals[1].add_(square))
    assert totals is not None
    grad, square = (assembled(layer, values, workspace) for values in totals)
    workspace.give_back(values for values in totals if values.data_ptr() not in {grad.data_ptr(), square.data_ptr()})
    return grad, square


def _at_once(delta: Tensor, parts: list[Tensor], workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i and Σ_i c_i² with c_i = δ_i x̃_iᵀ, ``[parts, groups, Cout / groups, K]``."""
    rows, columns = delta.shape[2], parts[0].shape[2]
    transposed = rows % VECTOR == 0 and columns % VECTOR != 0
    shape = (columns, rows) if transposed else (rows, columns)
    products = workspace.empty("products", (len(parts), *delta.shape[:2], *shape), delta)
    for product, patches in zip(products.flatten(1, 2), parts, strict=True):
        first, second = (patches, delta) if transposed else (delta, patches)
        torch.bmm(first.flatten(0, 1), second.flatten(0, 1).transpose(1, 2), out=product)
    grad, square = products.sum(1), products.square_().sum(1)
    return (grad.transpose(2, 3), square.transpose(2, 3)) if transposed else (grad, square)
