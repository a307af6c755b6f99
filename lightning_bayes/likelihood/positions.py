"""Where the values of a loss function stand in an output of a network, by gradients.

With values z of an output f, every position of f that one value alone reads has

    w = ∂ Σ_n z_n / ∂f        w' = ∂ Σ_n n z_n / ∂f        n = w'/w,

the number of that value, although the step has transposed, flattened, selected or scaled the output. w = 0 where nothing
reads it. Numbers that a precision cannot hold are found digit by digit; random numbers in place of n check the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Edge: TypeAlias = tuple[Any, int]  # a node of autograd and the index of one of its outputs


class Positions(NamedTuple):
    """The values that an output's positions are read by."""

    numbers: Tensor  # of the value, in the shape of the output; -1 where none reads it
    factor: Tensor  # w

    @property
    def read(self) -> Tensor:
        """Whether a value reads each position."""
        return self.numbers >= 0

    def after(self, inner: Positions) -> Positions:
        """The positions of these values in an output in which what they are positions in has the positions `inner`."""
        numbers = torch.where(inner.read, self.numbers.flatten()[inner.numbers.clamp_min(0)], -1)
        return Positions(numbers, inner.factor)

    def moved(self, values: Tensor) -> Tensor:
        """Values at the positions of the output that they read; arbitrary elsewhere."""
        return values.flatten()[self.numbers.clamp_min(0)]


def edge_of(value: Tensor) -> Edge:
    """The edge of autograd that leads to a value."""
    return value.grad_fn, value.output_nr


def positions_in(values: Tensor, output: Tensor) -> Positions | None:
    """The positions of values in an output that they are computed from; None if a position enters several values."""
    if edge_of(values) == edge_of(output):
        count = torch.arange(output.numel(), device=output.device)
        return Positions(count.view(output.shape), torch.ones_like(output, requires_grad=False))
    factor = _gradient(values, output, torch.ones_like(values, requires_grad=False))
    if factor is None or not bool(factor.isfinite().all()):
        return None
    base = max(2, int(0.1 / max(torch.finfo(each.dtype).eps for each in (values, output))))
    safe = torch.where(factor == 0, torch.ones_like(factor), factor).double()
    numbers, place = torch.zeros_like(output, dtype=torch.long, requires_grad=False), 1
    count = torch.arange(values.numel(), device=values.device).view(values.shape)
    while place < values.numel():
        found = _gradient(values, output, (count // place % base).to(values.dtype))
        assert found is not None
        numbers += (found.double() / safe).round().long().clamp(0, base - 1) * place
        place *= base
    numbers = torch.where(factor == 0, -1, numbers.clamp_max(values.numel() - 1))
    result = Positions(numbers, factor)
    return result if _is_right(values, output, result) else None


def _is_right(values: Tensor, output: Tensor, found: Positions) -> bool:
    """Whether positions explain the gradient of a random combination of the values."""
    generator = torch.Generator(values.device).manual_seed(0)
    weights = 1 + torch.rand(values.shape, generator=generator, device=values.device, dtype=torch.float32)
    weights = weights.to(values.dtype)
    gradient = _gradient(values, output, weights)
    assert gradient is not None
    expected = torch.where(found.read, found.moved(weights).to(gradient.dtype) * found.factor, 0)
    tolerance = 8 * torch.finfo(gradient.dtype).eps
    return bool(found.read.any()) and torch.allclose(gradient, expected, rtol=tolerance, atol=0)


def _gradient(values: Tensor, output: Tensor, weights: Tensor) -> Tensor | None:
    return torch.autograd.grad(values, output, weights, retain_graph=True, allow_unused=True)[0]


def nearest(root: Edge, edges: Iterable[Edge]) -> set[Edge]:
    """Those of some edges that an edge leads to, itself included, without passing another of them."""
    wanted, found, stack, seen = set(edges), set[Edge](), [root], {root}
    while stack:
        edge = stack.pop()
        if edge in wanted:
            found.add(edge)
        elif edge[0] is not None:
            new = [child for child in edge[0].next_functions if child not in seen]
            seen.update(new)
            stack += new
    return found
