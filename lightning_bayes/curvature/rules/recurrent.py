"""nn.LSTM, nn.GRU and nn.RNN: the gradients δ of all gates once, then products over time as those of linear layers.

With a_t = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh, the gates' arguments at step t,

    c_i(W_ih) = Σ_t δ_it x_itᵀ        c_i(W_hh) = Σ_t δ_it h_i,t-1ᵀ        c_i(b_ih) = c_i(b_hh) = Σ_t δ_it

(GRU: the new gate takes r_t ⊙ (W_hn h_{t-1} + b_hn), so its δ on the hidden side has the factor r_t.) Fused kernels hide
their gates. They follow from inputs and hidden states in one product for all steps; what remains is a backward loop of a
few operations a step. `torch.lstm` and its kin compute the hidden states of layers below the top again.

    LSTM    c_t = f_t c_{t-1} + i_t g_t,   m_t = o_t tanh(c_t),   h_t = m_t, or W_hr m_t under projection
    GRU     h_t = (1 - z_t) n_t + z_t h_{t-1},   n_t = tanh(a_n + r_t (W_hn h_{t-1} + b_hn))
    RNN     h_t = tanh(a_t) or relu(a_t)

Dropout between layers draws the forward's numbers again, which holds for the kernels of processors but not for cuDNN's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lightning_bayes.curvature.rules.linear import matrix_sums
from lightning_bayes.curvature.rules.packed import contributions_by_length, sums_by_length, unpacked
from lightning_bayes.curvature.rules.recurrent_cells import CELLS, Cell, Steps
from lightning_bayes.curvature.rules.registry import ExampleDims, Inputs, PerExample, Sums, add_sums, layer_rule
from lightning_bayes.curvature.workspace import Workspace


class _Part(NamedTuple):
    """One direction of one layer; tensors are ``[T, B, ·]`` in the order in which it runs through them."""

    suffix: str  # of its parameters' names
    cell: Cell
    x: Tensor
    steps: Steps  # what its cell has computed


def _suffix(number: int, direction: int) -> str:
    return "_".join([f"l{number}", *["reverse"] * direction])


def _example_dims(layer: nn.RNNBase, inputs: Inputs) -> ExampleDims:
    return (0 if layer.batch_first else 1), 1, 0


def _draw(steps_first: bool, state: tuple[int, ...] = ()) -> Any:
    """Five sequences of three steps; `state` holds layers × directions, and the features of each state."""

    def draw(generator: Generator) -> Inputs:
        x = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
        first = [torch.randn(state[0], 5, size, generator=generator, dtype=torch.float64) for size in state[1:]]
        return (x if steps_first else x.transpose(0, 1)), *(
            [tuple(first) if len(first) > 1 else first[0]] if first else []
        )

    return draw


@layer_rule(
    *(nn.LSTM, nn.GRU, nn.RNN),
    parameters=tuple(
        f"{name}_{suffix}"
        for layer in range(64)
        for suffix in (_suffix(layer, 0), _suffix(layer, 1))
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    ),
    input_dims=3,
    example_dims=_example_dims,
    applies=lambda layer: not (layer.dropout and layer.num_layers > 1 and layer.weight_ih_l0.is_cuda),
    repeats_noise=lambda layer: layer.training and layer.dropout > 0,
    by_hooks=False,
    later_dims=(1, 1),  # of the last states
    prepare=unpacked,
    cases=[
        (lambda: nn.LSTM(4, 3), _draw(True)),
        (lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True), _draw(False, (4, 3, 3))),
        (lambda: nn.LSTM(4, 3, bias=False, proj_size=2, bidirectional=True), _draw(True, (2, 2, 3))),
        (lambda: nn.LSTM(4, 3, num_layers=2, proj_size=2, batch_first=True), _draw(False)),
        (lambda: nn.GRU(4, 3, batch_first=True), _draw(False)),
        (lambda: nn.GRU(4, 3, num_layers=2, bidirectional=True), _draw(True, (4, 3))),
        (lambda: nn.GRU(4, 3, bias=False), _draw(True, (1, 3))),
        (lambda: nn.RNN(4, 3, num_layers=2), _draw(True, (2, 3))),
        (lambda: nn.RNN(4, 3, nonlinearity="relu", bidirectional=True, batch_first=True), _draw(False)),
    ],
)
def recurrent(layer: nn.RNNBase, inputs: Inputs, grad_output: Any) -> PerExample:
    """Per-example contributions; ``grad_output`` holds that of the outputs and those of the last states, or None."""
    if len(inputs) > 2:
        return contributions_by_length(recurrent, layer, inputs, grad_output)
    found: PerExample = {}
    for name, x, delta in _maps(layer, inputs, grad_output):
        found[name] = delta.sum(1) if x is None else delta.mT @ x
    return found


@recurrent.saved_from_forward
def top_states(layer: nn.RNNBase, output: Any) -> Tensor:
    """The outputs: hidden states of the top layer."""
    top: Tensor = output[0].detach()
    return top


@recurrent.fast_sums
def recurrent_sums(
    layer: nn.RNNBase, inputs: Inputs, grad_output: Any, workspace: Workspace, top: Tensor | None = None
) -> Sums:
    """Sums of contributions and of their squares, as those of linear layers."""
    if len(inputs) > 2:
        return sums_by_length(recurrent_sums, layer, inputs, grad_output, workspace)
    found: Sums = {}
    for name, x, delta in _maps(layer, inputs, grad_output, top):
        if x is None:
            add_sums(found, name, delta.sum(1))
        else:
            found[name] = matrix_sums(x, delta, workspace)
    return found


@torch.no_grad()
def _maps(
    layer: nn.RNNBase, inputs: Inputs, grad_output: Any, top: Tensor | None = None
) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """Every map: its parameter, what a matrix sees, and the gradient of what it returns, ``[B, T, ·]``."""
    grad, *of_last = grad_output
    if grad is None:
        size = _directions(layer) * (layer.proj_size or layer.hidden_size)
        grad = inputs[0].new_zeros(*inputs[0].shape[:2], size)
    grad = grad.transpose(0, 1) if layer.batch_first else grad
    layers = _forward(layer, inputs, top)
    for number in reversed(range(layer.num_layers)):
        parts, mask = layers[number]
        below: Tensor | float = 0.0
        for d, (part, delta_out) in enumerate(zip(parts, grad.chunk(len(parts), -1), strict=True)):
            last = [None if g is None else g[number * len(parts) + d] for g in of_last]
            found = part.cell.backward(part.steps, delta_out.flip(0) if d else delta_out, last)
            of_input = found.of_input @ _weight(layer, "weight_ih", part)
            below = below + (of_input.flip(0) if d else of_input)
            yield from _named(layer, part, found)
        grad = below if mask is None else below * mask


def _named(layer: nn.RNNBase, part: _Part, found: Any) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    seen = [
        ("weight_ih", part.x, found.of_input),
        ("weight_hh", part.steps.before, found.of_hidden),
        ("bias_ih", None, found.of_input),
        ("bias_hh", None, found.of_hidden),
        ("weight_hr", part.steps.projected, found.of_output),
    ]
    for name, x, delta in seen:
        if hasattr(layer, f"{name}_{part.suffix}"):
            yield f"{name}_{part.suffix}", None if x is None else x.transpose(0, 1), delta.transpose(0, 1)


def _forward(layer: nn.RNNBase, inputs: Inputs, top: Tensor | None) -> list[tuple[list[_Part], Tensor | None]]:
    """All layers from below: their directions, and the mask of the dropout before them."""
    x, first = inputs[0], inputs[1] if len(inputs) > 1 else None
    x = x.transpose(0, 1) if layer.batch_first else x
    states = () if first is None else first if isinstance(first, tuple) else (first,)
    found = list[tuple[list[_Part], Tensor | None]]()
    mask: Tensor | None = None
    for number in range(layer.num_layers):
        is_top = number + 1 == layer.num_layers
        known = None if top is None or not is_top else (top.transpose(0, 1) if layer.batch_first else top).to(x.dtype)
        parts = list(_directions_of(layer, number, x, [state.detach().to(x.dtype) for state in states], known))
        found.append((parts, mask))
        if not is_top:
            x = torch.cat([p.steps.after.flip(0) if d else p.steps.after for d, p in enumerate(parts)], -1)
            mask = F.dropout(torch.ones_like(x), layer.dropout) if layer.training and layer.dropout else None
            x = x if mask is None else x * mask
    return found


def _directions_of(
    layer: nn.RNNBase, number: int, x: Tensor, states: list[Tensor], known: Tensor | None
) -> Iterator[_Part]:
    count = _directions(layer)
    outputs = (None,) * count if known is None else known.chunk(count, -1)
    for d, output in enumerate(outputs):
        suffix = _suffix(number, d)
        cell, seen = CELLS[layer.mode](layer, suffix, x.dtype), x.flip(0) if d else x
        start = [state[number * count + d] for state in states] or cell.zeros(x)
        after = cell.run(seen, start) if output is None else output.flip(0) if d else output
        yield _Part(suffix, cell, seen, cell.steps(seen, start, after))


def _directions(layer: nn.RNNBase) -> int:
    return 2 if layer.bidirectional else 1


def _weight(layer: nn.RNNBase, name: str, part: _Part) -> Tensor:
    weight: Tensor = getattr(layer, f"{name}_{part.suffix}")
    return weight.detach().to(part.x.dtype)
