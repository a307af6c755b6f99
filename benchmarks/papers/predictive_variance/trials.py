"""The trials: 20 random rows to train on and 100 others to ask about, all trials stacked."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from benchmarks.papers.uci.data import Splits, stack_splits
from lightning_bayes.zoo.data.uci import read_uci

NUM_TRAIN: Final = 20
NUM_QUERY: Final = 100


def load_trials(root: Path, name: str, count: int = 10) -> Splits:
    """Draw trials from a set, standardised on what each trains on.

    Args:
        root: Folder of the UCI sets.
        name: The set.
        count: Number of trials.

    Returns:
        The trials as splits, the queries as their test rows.
    """
    stored, generator = read_uci(root, name), torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(stored.targets), generator=generator) for _ in range(count)]
    return stack_splits(stored, [(o[:NUM_TRAIN], o[NUM_TRAIN : NUM_TRAIN + NUM_QUERY]) for o in orders])
