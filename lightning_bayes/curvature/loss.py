"""The record of a loss: what it reduced, and how, as its functions were called; or its explicit per-example losses.

Backward through a batch loss L yields every example's *contribution* c_i to the gradient. The per-example gradient g_i
depends on how L reduces the per-example losses ℓ_i:

    reduction="mean":  L = (1/n) Σ ℓ_i    →    g_i = n c_i        mean_i g_i² = n   Σ c_i²
    reduction="sum":   L =       Σ ℓ_i    →    g_i =   c_i        mean_i g_i² = 1/n Σ c_i²

n is the number of examples that count; an example whose targets are all `ignore_index` does not. `LossReader` records
PyTorch's loss functions, means and sums, the sums of these, and their products with numbers. The reduction of any other loss
is unknown. Where it is, the squares may come from explicit per-example losses, and the gradient alone from L:

    ĝ from the scalar loss L        ĥ = (1/n) Σ_i (∂ℓ_i/∂θ)² from the per-example losses ℓ_i

An example is the Dice loss of a batch: it is not a sum over the images, but each image has a Dice loss.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor

from lightning_bayes.curvature.loss_terms import Step
from lightning_bayes.errors import ShapeError, UnsupportedTrainingError
from lightning_bayes.likelihood.loss_functions import LossCall

KEY: Final = "per_example_loss"  # key in the dictionary that training_step returns
LOSSES: Final = "with_per_example_loss"  # in a node's metadata
_ASSUMED: Final = (
    "The loss does not show how it reduces the examples of a batch, so it counts as a mean over them. Pass "
    "loss_reduction='mean' or 'sum' to state it."
)
# "auto_or_mean" is "auto" where the scale of the curvature does not matter: an unknown reduction counts as a mean.
LossReduction: TypeAlias = Literal["auto", "auto_or_mean", "mean", "sum"]


@dataclass(frozen=True, eq=False)
class LossRecord:
    """How one loss reduced its examples."""

    reduction: str = "mean"
    why: str = ""  # predicate of a sentence about the loss, if the reduction is unknown
    num_counted: int | None = None  # n ≥ 1; None if all examples count
    call: LossCall | None = None  # if the loss is the result of one call
    host: Step | None = None  # the product by which the training loop scaled the loss


def settled(record: LossRecord, reduction: LossReduction, batch_size: int | None) -> LossRecord:
    """The record with the declared reduction, or with a mean where an unknown one may count as a mean; else an error."""
    if reduction in {"mean", "sum"}:
        return replace(record, reduction=reduction)
    if record.reduction != "unknown" or batch_size is None:  # no layer saw an example
        return record
    if reduction == "auto_or_mean":
        warnings.warn(_ASSUMED, stacklevel=3)
        return replace(record, reduction="mean")
    raise UnsupportedTrainingError(
        f"The loss {record.why} in a batch of {batch_size} examples, so it may be a mean or a sum over them. Pass "
        "loss_reduction='mean' or 'sum', take the .mean() over the examples, or return the per-example losses as well: "
        '{"loss": loss, "per_example_loss": losses}.'
    )


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
        node.metadata[LOSSES] = per_example_loss
    return result


def compared(record: LossRecord, loss: Tensor, losses: Tensor) -> LossRecord:
    """A record whose unknown reduction is read from the value of the loss, compared with its per-example losses."""
    reduction, value = record.reduction, float(loss.detach())
    value /= 1.0 if record.host is None else record.host.factor or 1.0
    if reduction == "unknown" and math.isclose(value, float(losses.detach().mean()), rel_tol=1e-4):
        reduction = "mean"
    elif reduction == "unknown" and math.isclose(value, float(losses.detach().sum()), rel_tol=1e-4):
        reduction = "sum"
    return replace(record, reduction=reduction, num_counted=None)


def refuse_losses(captured: object, losses: Tensor) -> NoReturn:
    """`Capture.measure_losses` of a capture that cannot measure per-example losses: raise `UnsupportedTrainingError`."""
    raise UnsupportedTrainingError(
        f"{KEY} is supported only with squared gradients (VOGN). Remove it, or use such a method."
    )
