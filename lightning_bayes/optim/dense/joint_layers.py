"""Which models the optimizers of `optim.dense.joint` take."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_bayes.errors import UnsupportedLayerError
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer, divide


def require_matrix_layers(model: nn.Module, param_groups: list[dict[str, Any]], optimizer: str) -> list[MatrixLayer]:
    """The layers of a model whose every trainable parameter lies in a linear layer or a convolution without groups.

    Args:
        model: The model.
        param_groups: The optimizer's groups.
        optimizer: What the message calls it.

    Returns:
        The layers in the order of the model.

    Raises:
        UnsupportedLayerError: Listing the layers that do not fit.
    """
    found = divide(model, param_groups, lambda weight, bias: True, max_side=2**31)
    others = [*found.others, *(layer.name for layer in found.layers if layer.shape[0] > 1)]
    if others:
        raise UnsupportedLayerError(
            f"{optimizer} joins the weights of linear layers and of convolutions without groups, each with weights of its "
            f"own, but these are others: {', '.join(name or type(model).__name__ for name in others)}. Freeze them with "
            "requires_grad_(False), or use NoisyKFAC or VOGN."
        )
    return found.layers
