"""The parameters that an optimizer takes from a model, and their reference sizes."""

from __future__ import annotations

import re

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError
from lightning_bayes.private_torch import NormBase


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
    each = (dict(module.named_parameters(recurse=False)) for module in model.modules())
    return {
        param: params["weight"]
        for params in each
        for name, param in params.items()
        if "weight" in params and param is not params["weight"]
    }


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def _of_norms(model: nn.Module) -> set[nn.Parameter]:
    """Trainable parameters of normalisation layers; empty if there are no others."""
    found = {param for module in model.modules() if isinstance(module, _NORMS) for param in module.parameters()}
    trained = {param for param in model.parameters() if param.requires_grad}
    return found if trained - found else set()


def has_norms(model: nn.Module) -> bool:
    """Whether a network has normalisation layers."""
    return any(isinstance(module, _NORMS) for module in model.modules())


def has_convolutions(model: nn.Module) -> bool:
    """Whether a network has convolutions."""
    return any(isinstance(module, _CONVOLUTIONS) for module in model.modules())


def points(model: nn.Module, bayesian: str | None, *, norms: bool = True) -> set[nn.Parameter]:
    """The parameters without a posterior.

    Args:
        model: Any module.
        bayesian: Regular expression, searched for in the names of the parameters that have one; None for all.
        norms: Whether None means those of normalisation layers too, if there are others.

    Returns:
        The others.

    Raises:
        HyperparameterError: If it is not a regular expression, or matches no trainable parameter.
    """
    if bayesian is None:
        return set() if norms else _of_norms(model)
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    try:
        others = {param for name, param in named if not re.search(bayesian, name)}
    except (re.error, TypeError) as error:
        raise HyperparameterError(f"bayesian={bayesian!r} is not a regular expression: {error}.") from error
    if len(others) == len(named):
        names = ", ".join(name for name, _ in named)
        raise HyperparameterError(f"bayesian={bayesian!r} matches none of the trainable parameters {names}.")
    return others
