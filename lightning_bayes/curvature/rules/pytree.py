"""The differentiable tensors in a module's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.errors import UnsupportedLayerError
from lightning_bayes.private_torch import tree_flatten, tree_unflatten

# Types of leaves that contain no hidden tensors.
_PLAIN_TYPES = (Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def differentiable(output: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """The floating-point and complex tensors of `output`, and a function that rebuilds it from replacements."""
    leaves, spec = tree_flatten(output)
    opaque = sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, _PLAIN_TYPES)})
    if opaque:
        raise UnsupportedLayerError(
            f"A module without its own rule returns {', '.join(opaque)}, which may hide tensors. Return tensors in tuples, "
            "lists or dictionaries, or freeze the parameters of the module with requires_grad_(False)."
        )
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and _is_differentiable(leaf)]

    def rebuild(replacements: list[Tensor]) -> Any:
        replaced = dict(zip(indices, replacements, strict=True))
        return tree_unflatten([replaced.get(i, leaf) for i, leaf in enumerate(leaves)], spec)

    return [leaves[i] for i in indices], rebuild


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
