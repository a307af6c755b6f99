"""Fixed random splits into training and validation examples, identical in every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from lightning_bayes.errors import HyperparameterError

_SPLIT_SEED: Final = 0  # constant, so that all results use the same split


def split_indices(num_examples: int, val_size: int, train_size: int | None = None) -> tuple[list[int], list[int]]:
    """Split a training set at random into training and validation indices."""
    remaining = num_examples - val_size
    if val_size < 0 or remaining < 1 or (train_size is not None and not 1 <= train_size <= remaining):
        raise HyperparameterError(
            f"val_size={val_size} and train_size={train_size} do not fit a training set of {num_examples} examples. "
            "val_size must be at least 0, train_size at least 1, and their sum at most the size of the training set."
        )
    order = _random_order(num_examples)
    return order[val_size:][:train_size], order[:val_size]


def stratified_split(targets: Sequence[int] | Tensor, fraction: float) -> tuple[list[int], list[int]]:
    """Hold out the same fraction of each class at random."""
    if not 0 <= fraction < 1:
        raise HyperparameterError(f"The held-out fraction {fraction:g} of each class must be in [0, 1).")
    remaining, held_out = [], []
    for label, members in _by_class(_random_order(len(targets)), targets).items():
        count = max(1, round(fraction * len(members))) if fraction > 0 else 0
        if count >= len(members):
            raise HyperparameterError(
                f"Holding out {count} of {len(members)} examples of class {label} leaves none for training. Hold out a "
                "smaller fraction, or add examples."
            )
        held_out += members[:count]
        remaining += members[count:]
    return remaining, held_out


def few_shots(indices: Sequence[int], targets: Sequence[int] | Tensor, shots: int) -> list[int]:
    """The first examples of each class."""
    by_class = _by_class(indices, targets)
    too_small = [f"{label} ({len(members)})" for label, members in by_class.items() if len(members) < shots]
    if shots < 1 or too_small:
        raise HyperparameterError(
            f"shots={shots} must be between 1 and the size of the smallest class; classes with too few examples: "
            f"{', '.join(too_small) or 'none'}."
        )
    return [index for members in by_class.values() for index in members[:shots]]


def _by_class(indices: Sequence[int], targets: Sequence[int] | Tensor) -> dict[int, list[int]]:
    labels = [int(label) for label in targets]
    members: dict[int, list[int]] = {label: [] for label in sorted(set(labels))}
    for index in indices:
        members[labels[index]].append(index)
    return members


def _random_order(count: int) -> list[int]:
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(_SPLIT_SEED)).tolist()
    return order
