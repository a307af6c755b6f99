"""The trials, stacked: 20 random training rows and 100 query rows."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from benchmarks.papers.uci.data import Splits, stack_splits
from lightning_bayes.zoo.data.uci import read_uci

NUM_TRAIN: Final = 20
NUM_QUERY: Final = 100


def load_trials(root: Path, name: str, count: int = 10) -> Splits:
    """Draw trials from a UCI set, standardised with their training rows; the queries are the test rows of the splits."""
    stored, generator = read_uci(root, name), torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(stored.targets), generator=generator) for _ in range(count)]
    return stack_splits(stored, [(o[:NUM_TRAIN], o[NUM_TRAIN : NUM_TRAIN + NUM_QUERY]) for o in orders])
