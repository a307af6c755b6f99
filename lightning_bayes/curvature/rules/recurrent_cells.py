"""The cells of recurrent layers: their gates at all steps at once, and the gradients of the gates step by step.

Sequences are ``[T, B, ·]``; weights are detached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from typing_extensions import override


class Steps(NamedTuple):
    """Values of a cell at every step, ``[T, B, ·]``."""

    before: Tensor  # h_{t-1}
    after: Tensor  # h_t
    gates: tuple[Tensor, ...]
    projected: Tensor | None = None  # m_t, the input of W_hr


class Gradients(NamedTuple):
    """Gradients at every step, ``[T, B, ·]``."""

    of_input: Tensor  # of W_ih x_t + b_ih
    of_hidden: Tensor  # of W_hh h_{t-1} + b_hh
    of_output: Tensor  # of h_t


class Cell(ABC):
    """The cell of one direction of one layer."""

    def __init__(self, layer: nn.RNNBase, suffix: str, dtype: torch.dtype) -> None:
        def weight(kind: str) -> Any:
            param = getattr(layer, f"{kind}_{suffix}", None)
            return None if param is None else param.detach().to(dtype)

        self.weight_ih: Tensor = weight("weight_ih")
        self.weight_hh: Tensor = weight("weight_hh")
        self.bias_ih, self.bias_hh, self.weight_hr = weight("bias_ih"), weight("bias_hh"), weight("weight_hr")
        weights = (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh, self.weight_hr)
        self.params = [w for w in weights if w is not None]
        self.sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size]  # of h and c

    def zeros(self, x: Tensor) -> list[Tensor]:
        """Zero initial states."""
        return [x.new_zeros(x.shape[1], size) for size in self.sizes]

    @abstractmethod
    def run(self, x: Tensor, start: Sequence[Tensor]) -> Tensor:
        """h_t by torch's kernel."""

    @abstractmethod
    def steps(self, x: Tensor, start: Sequence[Tensor], after: Tensor) -> Steps:
        """All gates, from inputs and hidden states."""

    @abstractmethod
    def backward(self, steps: Steps, grad: Tensor, grad_cells: Tensor | None) -> Gradients:
        """Gradients of all gate pre-activations, given those of h_t and, in an LSTM, of c_t; None for zero."""

    def _of_input(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight_ih, self.bias_ih)

    def _of_hidden(self, before: Tensor) -> Tensor:
        return nn.functional.linear(before, self.weight_hh, self.bias_hh)

    def _options(self) -> tuple[Any, ...]:
        """Arguments of torch's kernels: has biases, one layer, no dropout, not training, unidirectional, not batch-first."""
        return self.bias_ih is not None, 1, 0.0, False, False, False


def _shifted(first: Tensor, after: Tensor) -> Tensor:
    """The states before each step, from the initial state and the states after each step."""
    return torch.cat([first[None], after[:-1]])


@final
class LSTMCell(Cell):
    """i, f, g, o = σ, σ, tanh, σ of a_t; c_t = f c_{t-1} + i g; m_t = o tanh(c_t); h_t = m_t or W_hr m_t."""

    @override
    def run(self, x: Tensor, start: Sequence[Tensor]) -> Tensor:
        output: Tensor = torch.lstm(x, [state[None] for state in start], self.params, *self._options())[0]
        return output

    def steps(self, x: Tensor, start: Sequence[Tensor], after: Tensor) -> Steps:
        """i, f, g, o, tanh(c_t), c_{t-1}."""
        before = _shifted(start[0], after)
        i, f, g, o = (self._of_input(x) + self._of_hidden(before)).chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        cells, cell = i * g, start[1]
        for new, forget in zip(cells, f, strict=True):
            cell = new.addcmul_(forget, cell)
        squashed = cells.tanh()
        projected = None if self.weight_hr is None else o * squashed
        return Steps(before, after, (i, f, g, o, squashed, _shifted(start[1], cells)), projected)

    @override
    def backward(self, steps: Steps, grad: Tensor, grad_cells: Tensor | None) -> Gradients:
        i, f, g, o, squashed, before = steps.gates
        # Gradients of i, f, g: factor · gradient of c_t. Gradient of o: factor · gradient of m_t.
        factors = torch.stack([g * i * (1 - i), before * f * (1 - f), i * (1 - g * g), squashed * o * (1 - o)], 2)
        through = o * (1 - squashed * squashed)
        deltas, grad_outputs = torch.empty_like(factors), grad.clone()
        grad_hidden: Tensor | float = 0.0
        grad_cell = torch.zeros_like(through[0])
        for t in reversed(range(len(grad))):
            grad_output = grad_outputs[t].add_(grad_hidden)
            grad_m = grad_output if self.weight_hr is None else grad_output @ self.weight_hr
            grad_cell = grad_cell if grad_cells is None else grad_cell + grad_cells[t]
            grad_cell = torch.addcmul(grad_cell, grad_m, through[t])
            torch.mul(factors[t, :, :3], grad_cell[:, None], out=deltas[t, :, :3])
            torch.mul(factors[t, :, 3], grad_m, out=deltas[t, :, 3])
            grad_hidden, grad_cell = deltas[t].flatten(1) @ self.weight_hh, grad_cell * f[t]
        grad_gates = deltas.flatten(2)
        return Gradients(grad_gates, grad_gates, grad_outputs)


@final
class GRUCell(Cell):
    """r, z = σ of a_t; q_t = W_hn h_{t-1} + b_hn; n = tanh(a_n + r q_t); h_t = (1-z) n + z h_{t-1}."""

    @override
    def run(self, x: Tensor, start: Sequence[Tensor]) -> Tensor:
        return torch.gru(x, start[0][None], self.params, *self._options())[0]

    def steps(self, x: Tensor, start: Sequence[Tensor], after: Tensor) -> Steps:
        """r, z, n, q."""
        before = _shifted(start[0], after)
        (xr, xz, xn), (hr, hz, q) = self._of_input(x).chunk(3, -1), self._of_hidden(before).chunk(3, -1)
        r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        return Steps(before, after, (r, z, (xn + r * q).tanh(), q))

    @override
    def backward(self, steps: Steps, grad: Tensor, grad_cells: Tensor | None) -> Gradients:
        r, z, n, q = steps.gates
        new = (1 - z) * (1 - n * n)
        factors = torch.stack([new * q * r * (1 - r), (steps.before - n) * z * (1 - z), new * r], 2)
        deltas, grad_outputs = torch.empty_like(factors), grad.clone()
        grad_hidden: Tensor | float = 0.0
        for t in reversed(range(len(grad))):
            grad_output = grad_outputs[t].add_(grad_hidden)
            torch.mul(factors[t], grad_output[:, None], out=deltas[t])
            grad_hidden = torch.addmm(grad_output * z[t], deltas[t].flatten(1), self.weight_hh)
        grad_input = torch.cat([deltas[:, :, :2].flatten(2), new * grad_outputs], -1)
        return Gradients(grad_input, deltas.flatten(2), grad_outputs)


@final
class PlainCell(Cell):
    """h_t = tanh(a_t) or relu(a_t)."""

    def __init__(self, layer: nn.RNNBase, suffix: str, dtype: torch.dtype) -> None:
        super().__init__(layer, suffix, dtype)
        self.is_relu = layer.mode == "RNN_RELU"

    @override
    def run(self, x: Tensor, start: Sequence[Tensor]) -> Tensor:
        kernel = torch.rnn_relu if self.is_relu else torch.rnn_tanh
        return kernel(x, start[0][None], self.params, *self._options())[0]

    def steps(self, x: Tensor, start: Sequence[Tensor], after: Tensor) -> Steps:
        """The derivative of tanh or relu."""
        slope = (after > 0).to(after.dtype) if self.is_relu else 1 - after * after
        return Steps(_shifted(start[0], after), after, (slope,))

    @override
    def backward(self, steps: Steps, grad: Tensor, grad_cells: Tensor | None) -> Gradients:
        (slope,) = steps.gates
        deltas = torch.empty_like(slope)
        grad_hidden: Tensor | float = 0.0
        for t in reversed(range(len(grad))):
            torch.mul(slope[t], grad[t] + grad_hidden, out=deltas[t])
            grad_hidden = deltas[t] @ self.weight_hh
        return Gradients(deltas, deltas, grad)


CELLS: dict[str, type[Cell]] = {"LSTM": LSTMCell, "GRU": GRUCell, "RNN_TANH": PlainCell, "RNN_RELU": PlainCell}
