"""Which of a model's parameters an optimizer takes, and how large they are meant to be."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require a gradient.

    Args:
        model: Any module.

    Returns:
        At least one.

    Raises:
        HyperparameterError: If there is none.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise HyperparameterError(
            f"{type(model).__name__} has no trainable parameter. Set requires_grad_(True) on what should be learned."
        )
    return params


def require_sizes(model: nn.Module) -> None:
    """Refuse lazy layers that have not seen a batch.

    Args:
        model: Any module.

    Raises:
        UnsupportedLayerError: Listing the parameters.
    """
    lazy = [name for name, param in model.named_parameters() if is_lazy(param)]
    if lazy:
        raise UnsupportedLayerError(
            f"{', '.join(lazy)} have no size yet. Call the model once with a batch before the optimizer is built."
        )


def reference_weights(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """The tensor that tells a parameter's size: a bias starts at zero and takes its layer's weight.

    Args:
        model: Any module.

    Returns:
        The layer's weight by parameter, for parameters beside a weight.
    """
    weights = ((module, module._parameters.get("weight")) for module in model.modules())
    return {
        param: weight
        for module, weight in weights
        for param in module._parameters.values()
        if weight is not None and param is not None and param is not weight
    }
