"""How a scalar loss reduces its examples, read from its autograd graph.

Backward through a batch loss L gives every example's *contribution* c_i to the gradient. To turn contributions into
per-example gradients g_i one must know how L reduces the losses ℓ_i of the examples:

    reduction="mean":  L = (1/n) Σ ℓ_i    →    g_i = n c_i        mean_i g_i² = n   Σ c_i²
    reduction="sum":   L =       Σ ℓ_i    →    g_i =   c_i        mean_i g_i² = 1/n Σ c_i²

with n the number of examples that count (an example whose targets are all `ignore_index` does not). `loss_reading` lists
which losses can be read; all others are refused until ``loss_reduction=`` declares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.loss_reading import LossReader
from lightning_bayes.curvature.loss_values import Values
from lightning_bayes.curvature.parameter_uses import enters_measured_layer
from lightning_bayes.errors import ShapeError, UnsupportedTrainingError
from lightning_bayes.private_torch import saved_by

LossReduction: TypeAlias = Literal["auto", "mean", "sum"]


@dataclass
class LossScale:
    """How one pass reduced its examples.

    Attributes:
        reduction: ``"mean"`` or ``"sum"``.
        counted: One boolean tensor per loss term that ignores targets: which count, examples first. Empty if all do.
    """

    reduction: str = "mean"
    counted: list[Tensor] = field(default_factory=list)
    _found: dict[int, int] = field(default_factory=dict, repr=False, compare=False)  # n by batch size

    def num_examples(self, batch_size: int) -> int:
        """Number of examples that count, n.

        Args:
            batch_size: Number of examples that the layers saw.

        Returns:
            n, at least 1.
        """
        if batch_size not in self._found:
            rows = [mask.reshape(batch_size, -1).any(1).cpu() for mask in self.counted]
            self._found[batch_size] = max(1, int(torch.stack(rows).any(0).sum())) if rows else batch_size
        return self._found[batch_size]


def read_loss_scale(
    loss: Tensor,
    reduction: LossReduction = "auto",
    divided_by_host: bool = False,
    batch_size: int | None = None,
    examples_second: bool = False,
) -> LossScale:
    """Read how `loss` reduced its examples.

    Args:
        loss: Scalar with a graph, before `backward`.
        reduction: ``"auto"`` reads the graph; ``"mean"`` and ``"sum"`` declare it.
        divided_by_host: Whether to overlook a last division, which the training loop added.
        batch_size: Number of examples that the layers saw; None if it is not known, and nothing can be measured.
        examples_second: See `LossReader`.

    Returns:
        The scale of this loss.
    """
    require_scalar(loss)
    declared = None if reduction == "auto" else reduction
    found = read_loss(loss, batch_size or 1, reduction, divided_by_host, examples_second)
    if found is None or batch_size is None:
        return LossScale(declared or "mean")
    counted = [mask for mask in found.terms if mask is not None]
    is_any_ignored = len(counted) == len(found.terms)
    return LossScale(declared or _reduction(found.loss, batch_size), counted if is_any_ignored else [])


def require_scalar(loss: Tensor) -> None:
    """Require a loss that backward takes.

    Args:
        loss: The loss.

    Raises:
        ShapeError: If it is not a scalar.
    """
    if loss.numel() != 1:
        raise ShapeError(f"The loss has shape {tuple(loss.shape)}; backward needs a scalar. Reduce it with .mean().")


def read_loss(
    loss: Tensor, batch_size: int, reduction: LossReduction, divided_by_host: bool, examples_second: bool = False
) -> LossReader | None:
    """Read the graph of a loss; arguments as in `read_loss_scale`.

    Args:
        loss: The loss.
        batch_size: Number of examples.
        reduction: Whether its reduction is declared.
        divided_by_host: Whether to overlook a last division.
        examples_second: See `LossReader`.

    Returns:
        What it holds; None if it has no graph, or one example alone, of which mean and sum are the same.
    """
    root = graph.root_of(loss)
    if divided_by_host and root is not None:
        root = graph.behind(root)
    if root is None or batch_size < 2:
        return None
    return LossReader(
        root,
        batch_size,
        shows_layers=enters_measured_layer(root),
        is_declared=reduction != "auto",
        examples_second=examples_second,
    )


def _reduction(loss: Values | None, batch_size: int) -> str:
    if loss is None:
        return "mean"
    if loss.divisor != 1:
        loss = Values("unclear", f"is a sum rescaled by 1/{loss.divisor:g}")
    if loss.kind == "part":
        loss = Values("unclear", "adds up the losses of some examples alone")
    if loss.kind not in {"mean", "sum"}:
        raise UnsupportedTrainingError(
            f"The loss {loss.why} in a batch of {batch_size} examples, so it may be a mean or a sum over them. Pass "
            "loss_reduction='mean' or 'sum', take the examples' .mean(), or return their losses beside it: "
            '{"loss": loss, "per_example_loss": losses}.'
        )
    return loss.kind


def loss_functions(loss: Tensor) -> set[str]:
    """Names of PyTorch's loss functions in a loss.

    The only place where the name of a graph's node decides more than the scale of a pass: `callbacks` takes from it how
    outputs become predictions, and from that the default noise of the weights.

    Args:
        loss: Scalar with a graph.

    Returns:
        Names such as ``"MseLoss"``, ``"NllLoss"`` or ``"BinaryCrossEntropyWithLogits"``.

    Example:
        >>> import torch
        >>> a = torch.zeros(2, requires_grad=True)
        >>> loss_functions(torch.nn.functional.mse_loss(a, torch.ones(2)))
        {'MseLoss'}
    """
    root = graph.root_of(loss)
    nodes = [] if root is None else graph.in_order(root, enters_measured_layer(root))
    return {graph.name_of(node) for node in nodes if saved_by(node, "reduction") is not None}


class BackwardWatch(TorchFunctionMode):
    """Calls `observe(loss)` before each ``loss.backward()``, for code that does not pass the loss on."""

    def __init__(self, observe: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._observe = observe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            self._observe(args[0])
        return func(*args, **(kwargs or {}))
