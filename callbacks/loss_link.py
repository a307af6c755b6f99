"""Reads from the training loss how outputs become predictions, if the module does not define it."""

from __future__ import annotations

from torch import Tensor

from lightning_bayes.curvature import loss_functions
from lightning_bayes.predictive import Link

_LINKS: dict[str, Link] = {
    "NllLoss": "softmax",
    "NllLoss2D": "softmax",
    "BinaryCrossEntropyWithLogits": "sigmoid",
    "BinaryCrossEntropy": "identity",  # outputs are probabilities, and so is their average
    "MseLoss": "identity",
    "SmoothL1Loss": "identity",
    "HuberLoss": "identity",
}


def link_of_loss(loss: Tensor) -> Link | None:
    """The link that matches a loss.

    Args:
        loss: Scalar with a graph.

    Returns:
        The link; None if the loss uses none of torch's loss functions, or functions with different links.

    Example:
        >>> import torch
        >>> link_of_loss(torch.nn.functional.mse_loss(torch.zeros(2, requires_grad=True), torch.ones(2)))
        'identity'
    """
    links = {_LINKS[name] for name in loss_functions(loss) if name in _LINKS}
    return links.pop() if len(links) == 1 else None
