"""nn.LSTM, nn.GRU and nn.RNN: one backward loop for the gradients δ of all gates, then products as for linear layers.

With the gate pre-activations a_t = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh at step t,

    c_i(W_ih) = Σ_t δ_it x_itᵀ        c_i(W_hh) = Σ_t δ_it h_i,t-1ᵀ        c_i(b_ih) = c_i(b_hh) = Σ_t δ_it

In a GRU, the new gate uses r_t ⊙ (W_hn h_{t-1} + b_hn), so its δ for W_hh and b_hh has the factor r_t. Fused kernels do not
return their gates. One product for all steps recomputes the gates from inputs and hidden states, and a backward loop with
few operations per step yields δ. `torch.lstm`, `torch.gru` and `torch.rnn_*` recompute the hidden states of layers below the
top.

    LSTM    c_t = f_t c_{t-1} + i_t g_t,   m_t = o_t tanh(c_t),   h_t = m_t, or W_hr m_t with projection
    GRU     h_t = (1 - z_t) n_t + z_t h_{t-1},   n_t = tanh(a_n + r_t (W_hn h_{t-1} + b_hn))
    RNN     h_t = tanh(a_t) or relu(a_t)

Packed sequences are padded, and the gradients of the padding are zero. The backward direction reads each sequence from its
own end. Dropout between layers repeats the random numbers of the forward. This works on CPUs but not with cuDNN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lightning_bayes.curvature.rules.linear import LinearMap, contributions_of, squares_of, sums_of
from lightning_bayes.curvature.rules.packed import unpacked
from lightning_bayes.curvature.rules.recurrent_cells import CELLS, Cell, Gradients, Steps
from lightning_bayes.curvature.rules.registry import ExampleDims, Inputs, PerExample, Squares, Sums, layer_rule
from lightning_bayes.curvature.workspace import Workspace


class _Call(NamedTuple):
    """The arguments of a call."""

    x: Tensor  # [T, B, features]
    states: list[Tensor]  # initial, [layers · directions, B, ·]; empty for zeros
    lengths: Tensor | None  # of padded sequences, [B]

    def in_order(self, values: Tensor, direction: int) -> Tensor:
        """Convert ``[T, B, ·]`` between time order and the processing order of a direction."""
        if not direction:
            return values
        if self.lengths is None:
            return values.flip(0)
        steps = torch.arange(len(values), device=values.device)[:, None]
        order = torch.where(steps < self.lengths, self.lengths - 1 - steps, steps)
        return values.gather(0, order[..., None].expand_as(values))

    def with_last(self, grad: Tensor, last: Tensor | None) -> Tensor:
        """Add the gradient of the final state ``[B, ·]`` to that of the states ``[T, B, ·]``, in processing order."""
        if last is None:
            return grad
        examples = torch.arange(len(last), device=last.device)
        lengths = torch.full_like(examples, len(grad)) if self.lengths is None else self.lengths
        return grad.index_put((lengths - 1, examples), last, accumulate=True)


class _Direction(NamedTuple):
    """One direction of one layer; tensors are ``[T, B, ·]`` in processing order."""

    suffix: str  # of the parameter names
    cell: Cell
    x: Tensor
    steps: Steps


def _suffix(depth: int, direction: int) -> str:
    return f"l{depth}_reverse" if direction else f"l{depth}"


def _example_dims(layer: nn.RNNBase, inputs: Inputs) -> ExampleDims:
    return (0 if layer.batch_first else 1), 1, 0


def _draw(steps_first: bool, state: tuple[int, ...] = ()) -> Any:
    """Draw five sequences of three steps. `state` is (layers × directions, features of each initial state)."""

    def draw(generator: Generator) -> Inputs:
        x = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
        x = x if steps_first else x.transpose(0, 1)
        states = [torch.randn(state[0], 5, size, generator=generator, dtype=torch.float64) for size in state[1:]]
        if not states:
            return (x,)
        return x, tuple(states) if len(states) > 1 else states[0]

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
    later_dims=(1, 1),  # of the final states
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
    """Per-example contributions; ``grad_output`` has the gradients of the outputs and the final states, or None for each."""
    return contributions_of(_linear_maps(layer, inputs, grad_output))


@recurrent.saved_from_forward
def top_states(layer: nn.RNNBase, output: Any) -> Tensor:
    """The outputs, which are the hidden states of the top layer."""
    top: Tensor = output[0].detach()
    return top


@recurrent.fast_squares
def recurrent_squares(
    layer: nn.RNNBase, inputs: Inputs, grad_output: Any, workspace: Workspace, top: Tensor | None = None
) -> Squares:
    """Sums of squared contributions, computed as for linear layers."""
    return squares_of(_linear_maps(layer, inputs, grad_output, top), workspace)


@recurrent.fast_sums
def recurrent_sums(
    layer: nn.RNNBase, inputs: Inputs, grad_output: Any, workspace: Workspace, top: Tensor | None = None
) -> Sums:
    """Sums of contributions and of their squares, computed as for linear layers."""
    return sums_of(_linear_maps(layer, inputs, grad_output, top), workspace)


@torch.no_grad()
def _linear_maps(layer: nn.RNNBase, inputs: Inputs, grad_output: Any, top: Tensor | None = None) -> Iterator[LinearMap]:
    """The linear maps of all gates."""
    grad, *state_grads = grad_output
    call = _call(layer, inputs)
    if grad is None:
        grad = call.x.new_zeros(*call.x.shape[:2], _directions(layer) * (layer.proj_size or layer.hidden_size))
    elif layer.batch_first:
        grad = grad.transpose(0, 1)
    layers = _forward(layer, call, top)
    for depth in reversed(range(layer.num_layers)):
        directions, mask = layers[depth]
        input_grad: Tensor | float = 0.0
        for d, (direction, delta_out) in enumerate(zip(directions, grad.chunk(len(directions), -1), strict=True)):
            last = [None if g is None else g[depth * len(directions) + d] for g in state_grads]
            gradients = _backward(call, direction, call.in_order(delta_out, d), *last)
            input_grad = input_grad + call.in_order(gradients.of_input @ direction.cell.weight_ih, d)
            yield from _maps_of(layer, direction, gradients)
        grad = input_grad if mask is None else input_grad * mask


def _call(layer: nn.RNNBase, inputs: Inputs) -> _Call:
    x, initial, lengths = (*inputs, None, None)[:3]
    x = x.transpose(0, 1) if layer.batch_first else x
    states = initial if isinstance(initial, tuple) else [] if initial is None else [initial]
    return _Call(x, [state.detach().to(x.dtype) for state in states], lengths)


def _backward(
    call: _Call, direction: _Direction, grad: Tensor, last: Tensor | None, last_cell: Tensor | None = None
) -> Gradients:
    """Gradients of the gates from those of the outputs ``[T, B, ·]`` and of the final states ``[B, ·]``."""
    grad_cells = None
    if last_cell is not None:
        grad_cells = call.with_last(grad.new_zeros(len(grad), *last_cell.shape), last_cell)
    return direction.cell.backward(direction.steps, call.with_last(grad, last), grad_cells)


def _maps_of(layer: nn.RNNBase, direction: _Direction, gradients: Gradients) -> Iterator[LinearMap]:
    maps = [
        ("weight_ih", direction.x, gradients.of_input),
        ("weight_hh", direction.steps.before, gradients.of_hidden),
        ("bias_ih", None, gradients.of_input),
        ("bias_hh", None, gradients.of_hidden),
        ("weight_hr", direction.steps.projected, gradients.of_output),
    ]
    for kind, x, delta in maps:
        name = f"{kind}_{direction.suffix}"
        if hasattr(layer, name):
            yield LinearMap(name, None if x is None else x.transpose(0, 1), delta.transpose(0, 1))


def _forward(layer: nn.RNNBase, call: _Call, top: Tensor | None) -> list[tuple[list[_Direction], Tensor | None]]:
    """All layers from the bottom: their directions, and the mask of the dropout before them."""
    x = call.x
    if top is not None:
        top = (top.transpose(0, 1) if layer.batch_first else top).to(x.dtype)
    layers: list[tuple[list[_Direction], Tensor | None]] = []
    mask: Tensor | None = None
    for depth in range(layer.num_layers):
        is_top = depth + 1 == layer.num_layers
        directions = _run_layer(layer, depth, call._replace(x=x), top if is_top else None)
        layers.append((directions, mask))
        if not is_top:
            x = torch.cat([call.in_order(direction.steps.after, d) for d, direction in enumerate(directions)], -1)
            mask = F.dropout(torch.ones_like(x), layer.dropout) if layer.training and layer.dropout else None
            x = x if mask is None else x * mask
    return layers


def _run_layer(layer: nn.RNNBase, depth: int, call: _Call, outputs: Tensor | None) -> list[_Direction]:
    """The directions of one layer with input `call.x`; `outputs` are its hidden states if they are known."""
    count = _directions(layer)
    directions = []
    hidden_states = (None,) * count if outputs is None else outputs.chunk(count, -1)
    for d, output in enumerate(hidden_states):
        suffix = _suffix(depth, d)
        cell, ordered = CELLS[layer.mode](layer, suffix, call.x.dtype), call.in_order(call.x, d)
        start = [state[depth * count + d] for state in call.states] or cell.zeros(ordered)
        after = cell.run(ordered, start) if output is None else call.in_order(output, d)
        directions.append(_Direction(suffix, cell, ordered, cell.steps(ordered, start, after)))
    return directions


def _directions(layer: nn.RNNBase) -> int:
    return 2 if layer.bidirectional else 1
