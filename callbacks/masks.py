"""Weights that ``torch.nn.utils.prune`` masks: a layer holds ``weight_orig`` and ``weight_mask``, and computes ``weight``.

Lightning's `ModelPruning` masks the weights during a fit, and replaces each pair by the product after it. Stored networks
name the product, as the module does before and after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

ORIGINAL, _MASK = "_orig", "_mask"


def masked_names(names: Iterable[str]) -> set[str]:
    """The weights that are computed, by the name of the product."""
    found = set(names)
    return {
        name.removesuffix(_MASK)
        for name in found
        if name.endswith(_MASK) and name.removesuffix(_MASK) + ORIGINAL in found
    }


def multiplied(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state dict with each product in place of its pair."""
    masked = masked_names(values)
    pairs = {name + end for name in masked for end in (ORIGINAL, _MASK)}
    products = {name: values[name + ORIGINAL] * values[name + _MASK] for name in masked}
    return {**{name: value for name, value in values.items() if name not in pairs}, **products}


def split(values: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """`multiplied` values for a module that holds the tensors `names`: a pair in place of each product that it computes."""
    masked = masked_names(names) & values.keys()
    pairs = {name + ORIGINAL: values[name] for name in masked}
    pairs |= {name + _MASK: torch.ones_like(values[name]) for name in masked}
    return {**{name: value for name, value in values.items() if name not in masked}, **pairs}
