"""How a scalar loss reduces its examples, read from its autograd graph.

Backward through a batch loss L yields every example's *contribution* c_i to the gradient. The per-example gradient g_i
depends on how L reduces the per-example losses ℓ_i:

    reduction="mean":  L = (1/n) Σ ℓ_i    →    g_i = n c_i        mean_i g_i² = n   Σ c_i²
    reduction="sum":   L =       Σ ℓ_i    →    g_i =   c_i        mean_i g_i² = 1/n Σ c_i²

n is the number of examples that count; an example whose targets are all `ignore_index` does not. `loss_reading` lists which
losses can be read. Other losses raise an error unless the user passes ``loss_reduction=``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.loss import LossReduction, require_scalar
from lightning_bayes.curvature.loss_reading import LossReader
from lightning_bayes.curvature.loss_values import Content, Part, Reduced, Unclear
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.private_torch import saved_by


@dataclass
class LossScale:
    """How one pass reduced its examples.

    Attributes:
        reduction: ``"mean"`` or ``"sum"``.
        counted: For each loss term, a mask of the targets that count, examples first. Empty if all examples count.
    """

    reduction: str = "mean"
    counted: list[Tensor] = field(default_factory=list)
    _num_examples: dict[int, int] = field(default_factory=dict, repr=False, compare=False)  # n by batch size

    def num_examples(self, batch_size: int) -> int:
        """Number of examples that count, n ≥ 1, in a batch of `batch_size` examples."""
        if batch_size not in self._num_examples:
            rows = [mask.reshape(batch_size, -1).any(1).cpu() for mask in self.counted]
            self._num_examples[batch_size] = max(1, int(torch.stack(rows).any(0).sum())) if rows else batch_size
        return self._num_examples[batch_size]


def read_loss_scale(
    loss: Tensor,
    reduction: LossReduction = "auto",
    batch_size: int | None = None,
    examples_second: bool = False,
) -> LossScale:
    """Read how `loss` reduced its examples; raise `UnsupportedTrainingError` if its graph does not show it.

    Args:
        loss: Scalar with a graph, before `backward`.
        reduction: ``"auto"`` reads the graph; ``"mean"`` and ``"sum"`` declare the reduction.
        batch_size: Number of examples that the layers saw; None if unknown.
        examples_second: See `LossReader`.

    Returns:
        The scale of this loss.
    """
    require_scalar(loss)
    declared = None if reduction == "auto" else reduction
    reader = read_loss(loss, batch_size or 1, reduction, examples_second)
    if reader is None or batch_size is None:
        return LossScale(declared or "mean")
    masks = [mask for mask in reader.terms if mask is not None]
    has_term_with_all = len(masks) < len(reader.terms)
    return LossScale(declared or _reduction(reader.loss, batch_size), [] if has_term_with_all else masks)


def read_loss(
    loss: Tensor, batch_size: int, reduction: LossReduction, examples_second: bool = False
) -> LossReader | None:
    """Read a loss; None if it has no graph or a single example, for which mean and sum are equal."""
    root = graph.root_of(loss)
    if root is None or batch_size < 2:
        return None
    return LossReader(root, batch_size, is_declared=reduction != "auto", examples_second=examples_second)


def _reduction(loss: Content | None, batch_size: int) -> str:
    if loss is None:
        return "mean"
    if isinstance(loss, Reduced) and loss.divisor == 1:
        return loss.kind
    if isinstance(loss, (Reduced, Part)) and loss.divisor != 1:
        why = f"is a sum rescaled by 1/{loss.divisor:g}"
    else:
        why = loss.why if isinstance(loss, Unclear) else "sums the losses of only some examples"
    raise UnsupportedTrainingError(
        f"The loss {why} in a batch of {batch_size} examples, so it may be a mean or a sum over them. Pass "
        "loss_reduction='mean' or 'sum', take the .mean() over the examples, or return the per-example losses as well: "
        '{"loss": loss, "per_example_loss": losses}.'
    )


def loss_functions(loss: Tensor) -> set[str]:
    """Names of the PyTorch loss functions in a loss.

    `callbacks` derives the link from outputs to predictions from these names, and from the link the default noise of the
    weights.

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
    return {graph.name_of(node) for node in graph.nodes_of(loss) if saved_by(node, "reduction") is not None}
