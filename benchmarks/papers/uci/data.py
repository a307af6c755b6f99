"""All splits of a set, stacked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lightning_bayes.zoo.data.uci import Standardiser, UCISet, read_uci


class Batch(NamedTuple):
    """A minibatch of every split.

    Attributes:
        inputs: Standardised, with a last column of ones, ``[R, B, D + 1]``.
        targets: Standardised, ``[R, B]``.
    """

    inputs: Tensor
    targets: Tensor


class Splits(NamedTuple):
    """R splits of one set; inputs and targets standardised on each split's training rows.

    Attributes:
        train: ``[R, n, D + 1]`` and ``[R, n]``.
        test: ``[R, m, D + 1]`` and ``[R, m]``.
        target_std: Unit of the standardised targets, ``[R]``.
    """

    train: Batch
    test: Batch
    target_std: Tensor

    @property
    def num_data(self) -> int:
        """N, training rows of each split."""
        return self.train.targets.shape[1]

    def held_out(self, share: float = 0.2) -> Splits:
        """The training rows alone, divided again: for the choice of hyperparameters, without a look at the test rows."""
        left = self.num_data - round(share * self.num_data)  # the rows are in random order
        parts = (
            Batch(self.train.inputs[:, rows], self.train.targets[:, rows]) for rows in (slice(left), slice(left, None))
        )
        return Splits(*parts, self.target_std)

    def subset(self, which: Tensor) -> Splits:
        """Some of the splits, by number."""
        train, test = (Batch(*(part[which] for part in rows)) for rows in (self.train, self.test))
        return Splits(train, test, self.target_std[which])


def load_splits(root: Path, name: str, count: int | None = None) -> Splits:
    """Read a set and stack its splits.

    Args:
        root: As in `read_uci`.
        name: As in `read_uci`.
        count: How many splits, from the first; None for all.

    Returns:
        The splits.

    Raises:
        SystemExit: If the splits are not of one size, which stacking needs.
    """
    stored = read_uci(root, name)
    chosen = stored.splits[:count]
    if len({(len(train), len(test)) for train, test in chosen}) != 1:
        raise SystemExit(f"The splits of {name} have different sizes, and only equal ones can train together.")
    return stack_splits(stored, chosen)


def stack_splits(stored: UCISet, chosen: list[tuple[Tensor, Tensor]]) -> Splits:
    """Standardise and stack splits of one size.

    Args:
        stored: The set.
        chosen: Rows for training and for testing, for each split.

    Returns:
        The splits.
    """
    train, test, units = zip(*(_standardised(stored, *rows) for rows in chosen), strict=True)
    return Splits(*(Batch(*map(torch.stack, zip(*part, strict=True))) for part in (train, test)), torch.stack(units))


def _standardised(stored: UCISet, train: Tensor, test: Tensor) -> tuple[Batch, Batch, Tensor]:
    inputs, targets = Standardiser.fit(stored.inputs[train]), Standardiser.fit(stored.targets[train])
    parts = [
        Batch(_with_ones(inputs.apply(stored.inputs[rows]).float()), targets.apply(stored.targets[rows]).float())
        for rows in (train, test)
    ]
    return parts[0], parts[1], targets.std.float()


def _with_ones(inputs: Tensor) -> Tensor:
    return torch.nn.functional.pad(inputs, (0, 1), value=1.0)


def epoch_of(data: Batch, size: int, generator: Generator) -> Iterator[Batch]:
    """All rows once, every split in an order of its own.

    Args:
        data: Rows of all splits.
        size: Rows of a batch; the last batch may be smaller.
        generator: Source of the order.

    Yields:
        Minibatches.
    """
    splits, rows = data.targets.shape
    order = torch.rand(splits, rows, generator=generator).argsort(1)
    which = torch.arange(splits)[:, None]
    inputs, targets = data.inputs[which, order], data.targets[which, order]
    yield from map(Batch, inputs.split(size, 1), targets.split(size, 1))
