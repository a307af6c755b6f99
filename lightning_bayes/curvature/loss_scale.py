"""The autograd graph of a scalar loss, read for how it reduces its examples.

Backward through a batch loss L yields every example's *contribution* c_i to the gradient. The per-example gradient g_i
depends on how L reduces the per-example losses ℓ_i:

    reduction="mean":  L = (1/n) Σ ℓ_i    →    g_i = n c_i        mean_i g_i² = n   Σ c_i²
    reduction="sum":   L =       Σ ℓ_i    →    g_i =   c_i        mean_i g_i² = 1/n Σ c_i²

n is the number of examples that count; an example whose targets are all `ignore_index` does not. `loss_reading` lists which
losses can be read. Other losses raise an error unless the user passes ``loss_reduction=``.
"""

from __future__ import annotations

from torch import Tensor

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.loss_reading import LossReader
from lightning_bayes.private_torch import saved_by


def read_loss(
    loss: Tensor, batch_size: int, reduction: LossReduction, examples_second: bool = False
) -> LossReader | None:
    """Read a loss; None if it has no graph or a single example, for which mean and sum are equal."""
    root = graph.root_of(loss)
    if root is None or batch_size < 2:
        return None
    return LossReader(root, batch_size, is_declared=reduction != "auto", examples_second=examples_second)


def loss_functions(loss: Tensor) -> set[str]:
    """Names of the PyTorch loss functions in a loss.

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
