"""Weights that ``torch.nn.utils.prune`` masks: a layer holds ``weight_orig`` and ``weight_mask``, and computes ``weight``.

Lightning's `ModelPruning` masks the weights during a fit, and replaces each pair by the product after it. Stored networks
name the product, as the module does before and after.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.private_torch import MASK, ORIGINAL, PRUNED


def masked_names(names: Iterable[str]) -> set[str]:
    """The weights that are computed, by the name of the product."""
    found = set(names)
    return {
        name.removesuffix(MASK) for name in found if name.endswith(MASK) and name.removesuffix(MASK) + ORIGINAL in found
    }


def multiplied(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state dict with each product in place of its pair."""
    masked = masked_names(values)
    pairs = {name + end for name in masked for end in PRUNED}
    products = {name: values[name + ORIGINAL] * values[name + MASK] for name in masked}
    return {**{name: value for name, value in values.items() if name not in pairs}, **products}


def split(values: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """`multiplied` values for a module that holds the tensors `names`: a pair in place of each product that it computes."""
    masked = masked_names(names) & values.keys()
    pairs = {name + ORIGINAL: values[name] for name in masked}
    pairs |= {name + MASK: torch.ones_like(values[name]) for name in masked}
    return {**{name: value for name, value in values.items() if name not in masked}, **pairs}


def masked(values: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`multiplied` values with the masks that a module holds now."""
    return {name: value * held[name + MASK] if name + MASK in held else value for name, value in values.items()}


def renamed(posterior: Any, names: Collection[str]) -> Any:
    """A posterior, which is a dataclass, with the names that a module holds now, with or without masks."""
    new = {name: _held(name, names) for name in posterior.mean}
    if all(name == held for name, held in new.items()):
        return posterior
    dicts = {f.name: value for f in fields(posterior) if isinstance(value := getattr(posterior, f.name), dict)}
    return replace(posterior, **{field: {new.get(k, k): v for k, v in value.items()} for field, value in dicts.items()})


def _held(name: str, names: Collection[str]) -> str:
    return next((n for n in (name, name + ORIGINAL, name.removesuffix(ORIGINAL)) if n in names), name)
