"""The tensors in what a module takes and returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.errors import UnsupportedLayerError
from lightning_bayes.private_torch import tree_flatten, tree_unflatten

_TRANSPARENT = (
    Tensor,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
)  # leaves of outputs


def differentiable(output: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """Take the floating-point tensors out of `output`.

    Args:
        output: A tensor or any nest of tuples, lists and dictionaries.

    Returns:
        These tensors, and a function that puts replacements for them back.

    Raises:
        UnsupportedLayerError: If `output` holds an object that may hide tensors: their gradients would be lost.
    """
    leaves, spec = tree_flatten(output)
    opaque = sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, _TRANSPARENT)})
    if opaque:
        raise UnsupportedLayerError(
            f"A module without a rule of its own returns {', '.join(opaque)}, whose tensors cannot be found. Return tensors "
            "in tuples, lists or dictionaries, or freeze the parameters of the module with requires_grad_(False)."
        )
    places = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]

    def rebuild(replacements: list[Tensor]) -> Any:
        new = dict(zip(places, replacements, strict=True))
        return tree_unflatten([new.get(i, leaf) for i, leaf in enumerate(leaves)], spec)

    return [leaves[i] for i in places], rebuild
