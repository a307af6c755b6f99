"""The stacked splits of a data set, and the hyperparameters of the methods."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lightning_bayes.zoo.data.uci import Standardiser, UCISet, read_uci

SMALL = 2000  # rows; both papers use smaller batches for smaller sets


@dataclass(frozen=True)
class Setting:
    """Hyperparameters; published ones unless a method's file says otherwise."""

    epochs: int
    batch: tuple[int, int]
    mc_samples: tuple[int, int]
    lr: float
    betas: tuple[float, float]
    decays: bool
    prior_precision: float = 1.0
    num_hidden: int = 50
    eval_samples: int = 100
    inverse_interval: int = 10

    def at_most(
        self, num_data: int, epochs: int | None = None, steps: int | None = None, mc_samples: int | None = None
    ) -> Setting:
        """Limit epochs, updates (rounded up to whole epochs) and K for N data; None does not limit."""
        limits = [self.epochs, epochs]
        if steps is not None:
            limits.append(math.ceil(steps / math.ceil(num_data / self.batch_for(num_data))))
        small, large = (count if mc_samples is None else min(count, mc_samples) for count in self.mc_samples)
        return replace(self, epochs=min(limit for limit in limits if limit is not None), mc_samples=(small, large))

    def batch_for(self, num_data: int) -> int:
        """Rows per batch."""
        return self.batch[num_data >= SMALL]

    def samples_for(self, num_data: int) -> int:
        """K."""
        return self.mc_samples[num_data >= SMALL]


# Appendix C.1 and the authors' configurations.
ZHANG = Setting(epochs=1000, batch=(10, 100), mc_samples=(10, 10), lr=0.01, betas=(0.9, 0.999), decays=True)
# Appendix J.1, with γ₁ and γ₂ as in the authors' code; the text has them swapped. Prior and noise precision are tuned.
KHAN = Setting(epochs=40, batch=(32, 128), mc_samples=(10, 5), lr=0.01, betas=(0.9, 0.99), decays=False)


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
