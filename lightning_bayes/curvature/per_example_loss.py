"""The losses of single examples beside the scalar that is trained: for losses that no graph tells how they reduce.

    ĝ from the scalar L        ĥ = (1/n) Σ_i (∂ℓ_i/∂θ)²  from the losses ℓ_i that were given beside it

The Dice loss of a batch is one: it has no terms, but each image has a Dice loss of its own.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.loss import LossReduction, LossScale, read_loss_scale
from lightning_bayes.errors import ShapeError, UnsupportedTrainingError

KEY: Final = "per_example_loss"  # beside "loss" in what training_step returns


class LossBesideExamples(torch.autograd.Function):
    """The identity on a loss that knows the losses of its examples."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, losses: Tensor) -> Tensor:
        """The loss."""
        ctx.losses = losses
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradient of the loss alone."""
        return grad, None


class DeclaredExamples(torch.autograd.Function):
    """The identity on losses of single examples, where `LossReader` stops."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor) -> Tensor:
        """The losses."""
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Their gradient."""
        return grad


def with_per_example_loss(loss: Tensor, per_example_loss: Tensor) -> Tensor:
    """A loss whose curvature is that of the losses of its examples, whatever their relation.

    The gradient is that of `loss`; the squared gradients are those of `per_example_loss`, by a backward pass of their own.
    In a `training_step`, return ``{"loss": loss, "per_example_loss": losses}`` instead.

    Args:
        loss: The scalar to train, a mean or a sum over the examples in the sense of ``loss_reduction``.
        per_example_loss: One loss for each example, ``[batch]``, with its graph.

    Returns:
        `loss`, for ``backward()``.

    Raises:
        ShapeError: If one of them has another shape.
        UnsupportedTrainingError: If the losses have no graph.

    Example:
        >>> from lightning_bayes.curvature import measure
        >>> layer, x = torch.nn.Linear(1, 1, bias=False), torch.tensor([[1.0], [2.0]])
        >>> def loss():
        ...     outputs = layer(x)
        ...     return with_per_example_loss(outputs.logsumexp(0).sum(), outputs[:, 0])
        >>> measure(layer, loss, loss_reduction="mean").curvature["weight"]  # (1² + 2²) / 2
        tensor([[2.5000]])
    """
    if loss.numel() != 1 or per_example_loss.dim() != 1:
        raise ShapeError(
            f"{KEY} has shape {list(per_example_loss.shape)} beside a loss of shape {list(loss.shape)}. Pass one loss for "
            "each example, [batch], beside a scalar."
        )
    if torch.is_grad_enabled() and not per_example_loss.requires_grad:
        raise UnsupportedTrainingError(
            f"{KEY} has no graph, so its gradients are not known. Leave out .detach() and no_grad()."
        )
    beside: Tensor = LossBesideExamples.apply(loss, per_example_loss)
    return beside


def losses_beside(loss: Tensor, divided_by_host: bool) -> Tensor | None:
    """The losses that were given beside a loss.

    Args:
        loss: The loss, with its graph.
        divided_by_host: Whether a training loop may have divided it since.

    Returns:
        The losses; None if there are none.
    """
    node: Any = loss.grad_fn
    if node is not None and divided_by_host and graph.name_of(node) == "Div":
        node = graph.behind(node) or node
    return node.losses if node is not None and graph.name_of(node) == graph.BESIDE else None


def reduced_losses(losses: Tensor, reduction: str) -> Tensor:
    """The mean or the sum of losses of examples, as a loss that `LossReader` reads."""
    declared: Tensor = DeclaredExamples.apply(losses)
    return declared.mean() if reduction == "mean" else declared.sum()


def scale_beside(loss: Tensor, losses: Tensor, reduction: LossReduction, divided_by_host: bool) -> LossScale:
    """How a loss reduces the examples whose losses are known: as its graph says, or else as its value does.

    Args:
        loss: The loss.
        losses: Those of its examples.
        reduction: Whether its reduction is declared.
        divided_by_host: Whether to overlook a last division.

    Returns:
        The scale, in which all examples count.

    Raises:
        UnsupportedTrainingError: If neither tells.
    """
    if reduction != "auto" or len(losses) == 1:
        return LossScale("mean" if reduction == "auto" else reduction)
    try:
        return LossScale(read_loss_scale(loss, reduction, divided_by_host, len(losses)).reduction)
    except UnsupportedTrainingError:
        value = float(loss.detach()) * _host_divisor(loss, divided_by_host)
        for name, own in (("mean", losses.detach().mean()), ("sum", losses.detach().sum())):
            if math.isclose(value, float(own), rel_tol=1e-4):
                return LossScale(name)
        raise


def _host_divisor(loss: Tensor, divided_by_host: bool) -> float:
    root = graph.root_of(loss)
    numbers = graph.saved_numbers(root) if divided_by_host and root is not None else []
    return float(numbers[0]) if numbers else 1.0
