"""Explicit per-example losses, for training losses whose graph does not show how they reduce the examples.

    ĝ from the scalar loss L        ĥ = (1/n) Σ_i (∂ℓ_i/∂θ)² from the per-example losses ℓ_i

An example is the Dice loss of a batch: it is not a sum over the images, but each image has a Dice loss.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from lightning_bayes.curvature.loss import LossRecord
from lightning_bayes.errors import ShapeError, UnsupportedTrainingError

KEY: Final = "per_example_loss"  # key in the dictionary that training_step returns
_LOSSES: Final = "with_per_example_loss"  # in a node's metadata


def with_per_example_loss(loss: Tensor, per_example_loss: Tensor) -> Tensor:
    """Attach per-example losses to a training loss.

    The gradient comes from `loss`. The squared gradients come from `per_example_loss`, in a separate backward pass.
    In a `training_step`, return ``{"loss": loss, "per_example_loss": losses}`` instead.

    Args:
        loss: The scalar training loss, a mean or a sum over the examples according to ``loss_reduction``.
        per_example_loss: One loss per example, ``[batch]``, with its graph.

    Returns:
        `loss`, for ``backward()``.

    Raises:
        ShapeError: If `loss` is not a scalar or `per_example_loss` does not have one dimension.
        UnsupportedTrainingError: If the per-example losses have no graph.

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
            f"{KEY} has shape {list(per_example_loss.shape)} and the loss has shape {list(loss.shape)}. Pass one loss per "
            "example, [batch], and a scalar loss."
        )
    if torch.is_grad_enabled() and not per_example_loss.requires_grad:
        raise UnsupportedTrainingError(f"{KEY} has no graph, so it has no gradients. Remove .detach() and no_grad().")
    result = loss.view_as(loss)
    node: Any = result.grad_fn
    if node is not None:
        node.metadata[_LOSSES] = per_example_loss
    return result


def attached_losses(loss: Tensor, divided_by_host: bool) -> Tensor | None:
    """The per-example losses ``[n]`` attached to a loss, which the training loop may have divided; None if absent."""
    node: Any = loss.grad_fn
    if node is not None and divided_by_host and _LOSSES not in node.metadata:
        node = node.next_functions[0][0]
    return None if node is None else node.metadata.get(_LOSSES)


def compared(record: LossRecord, loss: Tensor, losses: Tensor) -> LossRecord:
    """A record whose unknown reduction is read from the value of the loss, compared with its per-example losses."""
    reduction, value = record.reduction, float(loss.detach()) / (record.host_factor or 1.0)
    if reduction == "unknown" and math.isclose(value, float(losses.detach().mean()), rel_tol=1e-4):
        reduction = "mean"
    elif reduction == "unknown" and math.isclose(value, float(losses.detach().sum()), rel_tol=1e-4):
        reduction = "sum"
    return replace(record, reduction=reduction, num_counted=None)
