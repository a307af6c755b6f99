"""nn.Embedding: y_t = W[x_t].

    c_i(W)[v] = Σ_{t: x_it = v} δ_it        zero for the padding index

An example uses few rows of W, so the sums run over (example, row) pairs and never store [B, V, D].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from lightning_bayes.curvature.rules.registry import Inputs, PerExample, Sums, layer_rule
from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.errors import UnsupportedLayerError


def _indices(*shape: int) -> Callable[[Generator], Inputs]:
    return lambda generator: (torch.randint(0, 7, shape, generator=generator),)


@layer_rule(
    nn.Embedding,
    parameters=("weight",),
    input_dims=1,
    takes_positions=True,
    cases=[
        (lambda: nn.Embedding(7, 3), _indices(5)),
        (lambda: nn.Embedding(7, 3, padding_idx=2), _indices(5, 6)),
    ],
)
def embedding(layer: nn.Embedding, inputs: Inputs, grad_output: Tensor) -> PerExample:
    """Per-example contributions, dense ``[B, V, D]``; the input holds indices ``[B, …]``, ``grad_output [B, …, D]``."""
    (x,) = inputs
    return {"weight": scattered(layer, len(x), *_keys(layer, x, grad_output))}


@embedding.fast_sums
def embedding_sums(layer: nn.Embedding, inputs: Inputs, grad_output: Tensor, workspace: Workspace) -> Sums:
    """Sums of contributions and of their squares, over the (example, row) pairs that occur."""
    return {"weight": pair_sums(layer, *_keys(layer, inputs[0], grad_output))}


def _keys(layer: nn.Embedding, x: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    """An integer key per (example, row) pair, and the output gradient, zero at the padding index."""
    refuse_options(layer)
    rows, delta = x.reshape(len(x), -1), grad_output.reshape(-1, layer.embedding_dim)
    if layer.padding_idx is not None:
        delta = delta * (rows.reshape(-1, 1) != layer.padding_idx)
    return pair_keys(layer, rows), delta


def pair_keys(layer: nn.Embedding | nn.EmbeddingBag, rows: Tensor) -> Tensor:
    """The key example · V + row of each index ``[B, T]``, flattened."""
    examples = torch.arange(len(rows), device=rows.device).unsqueeze(1)
    return (examples * layer.num_embeddings + rows).flatten()


def scattered(layer: nn.Embedding | nn.EmbeddingBag, examples: int, keys: Tensor, delta: Tensor) -> Tensor:
    """The gradient of the table per example, ``[B, V, D]``, from keys example · V + row ``[P]`` and δ ``[P, D]``."""
    dense = delta.new_zeros(examples * layer.num_embeddings, layer.embedding_dim).index_add_(0, keys, delta)
    return dense.view(examples, layer.num_embeddings, layer.embedding_dim)


def pair_sums(layer: nn.Embedding | nn.EmbeddingBag, keys: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of `scattered` and of its squares over examples, ``[V, D]``, from the (example, row) pairs that occur."""
    pairs, pair_index = torch.unique(keys, return_inverse=True)
    contribution = delta.new_zeros(len(pairs), layer.embedding_dim).index_add_(0, pair_index, delta)
    rows, zeros = pairs % layer.num_embeddings, delta.new_zeros(layer.weight.shape)
    grad = zeros.index_add(0, rows, contribution)
    return grad, zeros.index_add_(0, rows, contribution.square_())


def refuse_options(layer: nn.Embedding | nn.EmbeddingBag) -> None:
    """Raise `UnsupportedLayerError` for options that change the gradient or the table."""
    if layer.sparse or layer.scale_grad_by_freq or layer.max_norm is not None:
        raise UnsupportedLayerError(
            f"{layer} changes its gradient or its weight by sparse, scale_grad_by_freq or max_norm. Per-example gradients "
            "do not support these options. Turn them off."
        )
