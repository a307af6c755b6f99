"""The examples' shares of the gradient of a learned factor, such as Kendall's weights of tasks or a learned scale of a loss.

    L = a(φ) R        R = Σ_i R_i        ∂L/∂φ = Σ_i R_i ∂a/∂φ

Example i contributes R_i ∂a/∂φ, the share R_i / R of what autograd passes from the product to the factor. R is a mean or a
sum of recorded values. For a function of these, such as a root, there is no such share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.example_dims import Order, example_dim, outer_size
from lightning_bayes.curvature.layer_graph import nodes_behind
from lightning_bayes.curvature.loss_recorder import LossRecorder
from lightning_bayes.curvature.loss_terms import Term
from lightning_bayes.private_torch import without_torch_functions

_LINEAR = {"mean", "sum", "mul", "div", "scale", "stack"}  # steps that treat all values of a term alike


class LearnedFactor(NamedTuple):
    """A product of a learned factor and reduced losses."""

    node: Any  # of the product
    position: int  # of the factor among the product's inputs
    shares: Tensor  # R_i / R, [n]; [n, K] for a product with K stacked losses

    def params(self) -> set[nn.Parameter]:
        """The parameters of the factor."""
        nodes = nodes_behind([self.node.next_functions[self.position][0]])
        return {node.variable for node in nodes if hasattr(node, "variable")}

    def keep(self, chosen: Tensor) -> Callable[..., tuple[Tensor | None, ...]]:
        """A hook on the product that keeps the share of the examples in a mask ``[n]`` of the factor's gradient."""

        def hook(grads: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
            grad = grads[self.position]
            if grad is None:
                return grads
            own = grad * self.shares[chosen].sum(0).to(grad)
            return (*grads[: self.position], own, *grads[self.position + 1 :])

        return hook


def learned_factors(recorder: LossRecorder, loss: Tensor, num_examples: int, order: Order) -> Iterator[LearnedFactor]:
    """The products of a loss with learned factors, as far as the record tells the share of each example."""
    for node, position, terms in recorder.products(loss):
        with torch.no_grad(), without_torch_functions():
            shares = [_shares(term, num_examples, order) for term in terms]
        found = [each for each in shares if each is not None]
        if len(found) == len(terms) and all(term.is_stacked for term in terms):
            yield LearnedFactor(node, position, torch.stack(found, 1))
        elif len(found) == len(terms) == 1:
            yield LearnedFactor(node, position, found[0])


def _shares(term: Term, num_examples: int, order: Order) -> Tensor | None:
    """R_i / R of a term, ``[n]``; None if it is unknown."""
    if not _LINEAR.issuperset(step.kind for step in term.steps):
        return None
    values = term.values if term.call is None or term.call.reduction == "none" else term.call.unreduced()
    shape = tuple(values.shape)
    dim = example_dim(shape, num_examples, order)
    if dim is None:
        return None
    parts = values.reshape(outer_size(shape, dim, num_examples, order), num_examples, -1).double().sum((0, 2))
    return parts / parts.sum() if parts.sum() else torch.full_like(parts, 1 / num_examples)
