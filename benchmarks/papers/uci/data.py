"""The stacked splits of a data set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lightning_bayes.zoo.data.uci import Standardiser, UCISet, read_uci


class Batch(NamedTuple):
    """A minibatch from every split."""

    inputs: Tensor
    targets: Tensor


class Splits(NamedTuple):
    """R splits of a set; inputs and targets are standardised with the training rows of each split."""

    train: Batch
    test: Batch
    target_std: Tensor

    @property
    def num_data(self) -> int:
        """N, the number of training rows per split."""
        return self.train.targets.shape[1]

    def held_out(self, share: float = 0.2) -> Splits:
        """Split the training rows again, to choose hyperparameters without the test rows."""
        num_train = self.num_data - round(share * self.num_data)  # the rows are in random order
        parts = (
            Batch(self.train.inputs[:, rows], self.train.targets[:, rows])
            for rows in (slice(num_train), slice(num_train, None))
        )
        return Splits(*parts, self.target_std)

    def subset(self, indices: Tensor) -> Splits:
        """Select splits by index."""
        train, test = (Batch(*(part[indices] for part in rows)) for rows in (self.train, self.test))
        return Splits(train, test, self.target_std[indices])


def load_splits(root: Path, name: str, count: int | None = None) -> Splits:
    """Read a set and stack its splits."""
    stored = read_uci(root, name)
    splits = stored.splits[:count]
    if len({(len(train), len(test)) for train, test in splits}) != 1:
        raise SystemExit(f"The splits of {name} have different sizes, and only equal ones can train together.")
    return stack_splits(stored, splits)


def stack_splits(stored: UCISet, splits: list[tuple[Tensor, Tensor]]) -> Splits:
    """Standardise and stack splits of equal size, each given by its training and test rows."""
    train, test, units = zip(*(_standardised(stored, *rows) for rows in splits), strict=True)
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
    """Yield minibatches of an epoch; every split has a different order, and the last batch may be smaller."""
    splits, rows = data.targets.shape
    order = torch.rand(splits, rows, generator=generator).argsort(1)
    split = torch.arange(splits)[:, None]
    inputs, targets = data.inputs[split, order], data.targets[split, order]
    yield from map(Batch, inputs.split(size, 1), targets.split(size, 1))
