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

from lightning_bayes.curvature.rules.products import sums_by_blocks
from lightning_bayes.curvature.rules.registry import Inputs, PerExample, Sums, add_sums, layer_rule
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


@linear.fast_sums
def linear_sums(layer: nn.Linear, inputs: Inputs, grad_output: Tensor, workspace: Workspace) -> Sums:
    """Sums of contributions and of their squares; uses the rank-one identity without positions."""
    (x,) = inputs
    if x.dim() > 2:
        return sums_of(_maps(x, grad_output), workspace)
    delta_square, x_square = grad_output.square(), x.square()
    return {
        "weight": (grad_output.T @ x, delta_square.T @ x_square),
        "bias": (grad_output.sum(0), delta_square.sum(0)),
    }


def contributions_of(maps: Iterable[LinearMap]) -> PerExample:
    """The contributions c_i of linear maps."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for name, x, delta in maps:
        found[name].append(delta.sum(1) if x is None else delta.mT @ x)
    return {name: _joined(parts, 1) for name, parts in found.items()}


def sums_of(maps: Iterable[LinearMap], workspace: Workspace) -> Sums:
    """Σ_i c_i and Σ_i c_i² of linear maps."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for name, x, delta in maps:
        found[name].append(_vector_sums(delta) if x is None else _matrix_sums(x, delta, workspace))
    columns = {name: zip(*parts, strict=True) for name, parts in found.items()}
    return {name: (_joined(grads, 0), _joined(squares, 0)) for name, (grads, squares) in columns.items()}


def _maps(x: Tensor, grad_output: Tensor) -> list[LinearMap]:
    delta = grad_output.reshape(len(x), -1, grad_output.shape[-1])
    return [LinearMap("weight", x.reshape(len(x), -1, x.shape[-1]), delta), LinearMap("bias", None, delta)]


def _joined(parts: tuple[Tensor, ...] | list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _vector_sums(delta: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_i c_i and Σ_i c_i² of c_i = Σ_t δ_it, ``[out]``."""
    contributions = delta.sum(1)
    return contributions.sum(0), contributions.square_().sum(0)


def _matrix_sums(x: Tensor, delta: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i and Σ_i c_i² of c_i = Σ_t δ_it x_itᵀ, ``[out, in]``."""
    elements = x.shape[-1] * delta.shape[-1]
    # On an accelerator, launching many small kernels would dominate.
    if elements > MAX_BATCHED_ELEMENTS and x.is_cpu:
        shape = delta.shape[-1], x.shape[-1]
        sums = workspace.result(shape, x), workspace.result(shape, x)
        sums_by_blocks(delta.mT, x, sums, workspace)
        return sums
    totals: Sums = {}
    for x_part, delta_part in workspace.split(elements, x, delta):
        add_sums(totals, "matrix", delta_part.mT @ x_part)
    return totals["matrix"]
