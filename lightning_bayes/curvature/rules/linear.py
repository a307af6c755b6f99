"""nn.Linear with any leading dimensions: y = x Wᵀ + b.

    c_i(W) = Σ_t δ_it x_itᵀ        c_i(b) = Σ_t δ_it        t: positions, the dimensions between examples and features

Without positions, c_i(W) has rank one, so Σ_i c_i² = (δ²)ᵀ (x²) needs no per-example matrix (Goodfellow 2015,
https://arxiv.org/abs/1510.01799). With positions, every c_i(W) is computed; large ones are computed one by one.

Attention and recurrent layers consist of several linear maps and use the same functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.products import squares_by_blocks
from lightning_bayes.curvature.rules.registry import Inputs, PerExample, Squares, Sums, layer_rule
from lightning_bayes.curvature.workspace import Workspace

MAX_BATCHED_ELEMENTS = 50_000  # of one c_i(W), tuned on two cores with AVX-512


class LinearMap(NamedTuple):
    """A weight W or a bias b of a layer, and its positions. Maps with the same name are the rows of one parameter."""

    name: str
    x: Tensor | None  # inputs of W, [B, T, in]; None for b
    delta: Tensor  # output gradients, [B, T, out]


@layer_rule(
    nn.Linear,
    parameters=("weight", "bias"),
    takes_positions=True,
    cases=[
        (lambda: nn.Linear(4, 3), (5, 4)),
        (lambda: nn.Linear(4, 3, bias=False), (5, 6, 4)),
        (lambda: nn.Linear(4, 3), (5, 2, 6, 4)),
    ],
)
def linear(layer: nn.Linear, inputs: Inputs, grad_output: Tensor) -> PerExample:
    """Per-example contributions; the input is ``[B, …, in]``, ``grad_output [B, …, out]``."""
    return contributions_of(_maps(inputs[0], grad_output))


@linear.fast_squares
def linear_squares(layer: nn.Linear, inputs: Inputs, grad_output: Tensor, workspace: Workspace) -> Squares:
    """Sums of squared contributions; uses the rank-one identity without positions."""
    (x,) = inputs
    if x.dim() > 2:
        return squares_of(_maps(x, grad_output), workspace)
    delta_square = grad_output.square()
    return {"weight": delta_square.T @ x.square(), "bias": delta_square.sum(0)}


def contributions_of(maps: Iterable[LinearMap]) -> PerExample:
    """The contributions c_i of linear maps."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for name, x, delta in maps:
        found[name].append(delta.sum(1) if x is None else delta.mT @ x)
    return {name: _joined(parts, 1) for name, parts in found.items()}


def sums_of(maps: Iterable[LinearMap], workspace: Workspace) -> Sums:
    """Σ_i c_i and Σ_i c_i² of linear maps."""
    maps = list(maps)
    found: dict[str, list[Tensor]] = defaultdict(list)
    for name, x, delta in maps:
        rows = delta.flatten(0, 1)
        found[name].append(rows.sum(0) if x is None else rows.T @ x.flatten(0, 1))
    return {name: (_joined(found[name], 0), square) for name, square in squares_of(maps, workspace).items()}


def squares_of(maps: Iterable[LinearMap], workspace: Workspace) -> Squares:
    """Σ_i c_i² of linear maps."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for name, x, delta in maps:
        found[name].append(delta.sum(1).square_().sum(0) if x is None else _matrix_squares(x, delta, workspace))
    return {name: _joined(parts, 0) for name, parts in found.items()}


def _maps(x: Tensor, grad_output: Tensor) -> list[LinearMap]:
    delta = grad_output.reshape(len(x), -1, grad_output.shape[-1])
    return [LinearMap("weight", x.reshape(len(x), -1, x.shape[-1]), delta), LinearMap("bias", None, delta)]


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _matrix_squares(x: Tensor, delta: Tensor, workspace: Workspace) -> Tensor:
    """Σ_i c_i² of c_i = Σ_t δ_it x_itᵀ, ``[out, in]``."""
    shape = delta.shape[-1], x.shape[-1]
    elements = shape[0] * shape[1]
    # On an accelerator, launching many small kernels would dominate.
    if elements > MAX_BATCHED_ELEMENTS and x.is_cpu:
        square = x.new_empty(shape)
        squares_by_blocks(delta.mT, x, square, workspace)
        return square
    squares = [(d.mT @ v).square_().sum(0) for v, d in workspace.split(elements, x, delta)]
    return squares[0] if len(squares) == 1 else torch.stack(squares).sum(0)
