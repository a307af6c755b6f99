"""nn.EmbeddingBag: y_i = Σ_t w_it W[x_it], with explicit weights, 1 ("sum") or 1 / T_i ("mean"); or the maximum ("max").

    c_i(W)[v] = Σ_{t: x_it = v} w_it δ_i        zero for the padding index, which is excluded from the mean
    c_i(W)[v, d] = δ_id                         "max": if W[v, d] is the largest in the bag, else 0

Bags of different lengths, defined by offsets, become rows ``[B, longest]`` with weight 0 after the end of each bag.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from lightning_bayes.curvature.rules.embedding import pair_keys, pair_sums, refuse_options, scattered
from lightning_bayes.curvature.rules.registry import Inputs, PerExample, Sums, layer_rule
from lightning_bayes.curvature.workspace import Workspace


def bags(layer: nn.EmbeddingBag, inputs: Inputs) -> Inputs:
    """Convert the arguments of a call to rows of indices and weights, both ``[B, T]``; such rows stay as they are."""
    x, offsets, weights = inputs
    if x.dim() == 2:
        return x, None, _weights(layer, x, weights)
    ends = torch.cat([offsets, offsets.new_tensor([len(x)])]) if not layer.include_last_offset else offsets
    starts, lengths = ends[:-1], ends.diff()
    offset_in_bag = torch.arange(int(lengths.max()) if len(lengths) else 0, device=x.device)
    is_inside = offset_in_bag < lengths[:, None]
    index = (starts[:, None] + offset_in_bag).clamp(max=max(len(x) - 1, 0))
    rows = x[index] if len(x) else torch.zeros_like(index)
    return rows, None, _weights(layer, rows, None if weights is None else weights[index], is_inside)


def _weights(layer: nn.EmbeddingBag, x: Tensor, explicit: Tensor | None, is_inside: Tensor | None = None) -> Tensor:
    is_used = torch.ones_like(x, dtype=torch.bool) if is_inside is None else is_inside
    if layer.padding_idx is not None:
        is_used = is_used & (x != layer.padding_idx)
    weights = is_used.to(layer.weight.dtype)
    if explicit is not None:
        return weights * explicit.detach()
    return weights / weights.sum(1, keepdim=True).clamp(min=1) if layer.mode == "mean" else weights


def _indices(*shape: int, weighted: bool = False) -> Callable[[Generator], Inputs]:
    def draw(generator: Generator) -> Inputs:
        x = torch.randint(0, 7, shape, generator=generator)
        return (x, None, torch.rand(shape, generator=generator, dtype=torch.float64)) if weighted else (x,)

    return draw


@layer_rule(
    nn.EmbeddingBag,
    parameters=("weight",),
    input_dims=2,
    example_dims=(0, None, 0),
    prepare=bags,
    cases=[
        (lambda: nn.EmbeddingBag(7, 3), _indices(5, 4)),
        (lambda: nn.EmbeddingBag(7, 3, mode="sum", padding_idx=2), _indices(5, 4, weighted=True)),
        (lambda: nn.EmbeddingBag(7, 3, padding_idx=2), _indices(5, 6)),
        (lambda: nn.EmbeddingBag(7, 3, mode="max", padding_idx=1), _indices(5, 6)),
    ],
)
def embedding_bag(layer: nn.EmbeddingBag, inputs: Inputs, grad_output: Tensor) -> PerExample:
    """Per-example contributions, dense ``[B, V, D]``; ``grad_output [B, D]``."""
    return {"weight": scattered(layer, len(inputs[0]), *_keys(layer, inputs, grad_output))}


@embedding_bag.fast_sums
def embedding_bag_sums(layer: nn.EmbeddingBag, inputs: Inputs, grad_output: Tensor, workspace: Workspace) -> Sums:
    """Sums of contributions and of their squares, over the (example, row) pairs that occur."""
    return {"weight": pair_sums(layer, *_keys(layer, inputs, grad_output))}


def _keys(layer: nn.EmbeddingBag, inputs: Inputs, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    """An integer key per (example, row) pair, and the gradient of the row of each key."""
    refuse_options(layer)
    x, _, weights = bags(layer, inputs)
    return pair_keys(layer, x), _row_gradients(layer, x, weights, grad_output).flatten(0, 1)


def _row_gradients(layer: nn.EmbeddingBag, x: Tensor, weights: Tensor, grad_output: Tensor) -> Tensor:
    """The gradient of the row of each index, ``[B, T, D]``."""
    if layer.mode != "max":
        return weights.to(grad_output.dtype)[..., None] * grad_output[:, None]
    values = layer.weight.detach()[x].masked_fill(weights[..., None] == 0, -torch.inf)
    largest = values.argmax(1, keepdim=True)
    is_nonempty = (weights != 0).any(1)[:, None, None]
    delta = torch.zeros(values.shape, dtype=grad_output.dtype, device=x.device)
    return delta.scatter_(1, largest, grad_output[:, None] * is_nonempty)
