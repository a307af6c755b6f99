"""Fixed random splits into training and validation examples, the same in every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from lightning_bayes.errors import HyperparameterError

_SPLIT_SEED: Final = 0  # a constant, so that all results refer to one split


def split_indices(num_examples: int, val_size: int, train_size: int | None = None) -> tuple[list[int], list[int]]:
    """Fixed random positions for training and validation.

    Args:
        num_examples: Size of the training set.
        val_size: How many positions are for validation; the same ones whatever ``train_size`` is.
        train_size: How many positions are for training; None takes all others.

    Returns:
        Positions for training and for validation; none is in both.

    Raises:
        HyperparameterError: If the set is too small, or a size is not possible.

    Example:
        >>> train, val = split_indices(10, val_size=4)
        >>> sorted(train + val)
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    left = num_examples - val_size
    if val_size < 0 or left < 1 or (train_size is not None and not 1 <= train_size <= left):
        raise HyperparameterError(
            f"val_size={val_size} and train_size={train_size} do not fit a training set of {num_examples} examples: "
            f"both come out of it, val_size from 0 and train_size from 1. Make them smaller."
        )
    order = _random_order(num_examples)
    train = order[val_size:]
    return train[:train_size], order[:val_size]


def stratified_split(targets: Sequence[int] | Tensor, share: float) -> tuple[list[int], list[int]]:
    """Fixed random positions, the same share of each class set aside.

    Args:
        targets: Class of each example.
        share: Part of each class to set aside, in [0, 1); at least one example of it, unless the share is 0.

    Returns:
        Positions that stay and positions set aside; none is in both.

    Raises:
        HyperparameterError: If the share is out of range or would leave nothing of a class.

    Example:
        >>> stay, aside = stratified_split([0, 0, 0, 0, 1, 1], share=0.5)
        >>> len(aside), sorted(stay + aside)
        (3, [0, 1, 2, 3, 4, 5])
    """
    if not 0 <= share < 1:
        raise HyperparameterError(f"A share of {share:g} cannot be set aside of every class; it must lie in [0, 1).")
    stay, aside = [], []
    for label, members in _by_class(_random_order(len(targets)), targets).items():
        count = max(1, round(share * len(members))) if share > 0 else 0
        if count >= len(members):
            raise HyperparameterError(
                f"Class {label} has {len(members)} examples, so setting {count} aside leaves none for training. Make the "
                "share smaller, or add examples."
            )
        aside += members[:count]
        stay += members[count:]
    return stay, aside


def few_shots(indices: Sequence[int], targets: Sequence[int] | Tensor, shots: int) -> list[int]:
    """The first examples of each class.

    Args:
        indices: Positions to choose from, in order.
        targets: Class of each example of the whole set.
        shots: How many of each class.

    Returns:
        Positions, class after class.

    Raises:
        HyperparameterError: If a class has fewer; lists all that have.

    Example:
        >>> few_shots([3, 2, 1, 0], targets=[0, 1, 0, 1], shots=1)
        [2, 3]
    """
    members = _by_class(indices, targets)
    short = [f"{label} ({len(found)})" for label, found in members.items() if len(found) < shots]
    if shots < 1 or short:
        raise HyperparameterError(
            f"shots={shots} examples of each class cannot be had; too few are of class {', '.join(short) or 'any'}. Choose "
            "shots from 1 to the size of the smallest class."
        )
    return [index for found in members.values() for index in found[:shots]]


def _by_class(indices: Sequence[int], targets: Sequence[int] | Tensor) -> dict[int, list[int]]:
    labels = [int(label) for label in targets]
    members: dict[int, list[int]] = {label: [] for label in sorted(set(labels))}
    for index in indices:
        members[labels[index]].append(index)
    return members


def _random_order(count: int) -> list[int]:
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(_SPLIT_SEED)).tolist()
    return order
