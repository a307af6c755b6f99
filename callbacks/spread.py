"""Evaluation samples spread over processes that see the same examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_bayes.predictive import Samples
from lightning_bayes.strategies import BayesDDPStrategy


class SpreadSamples(Samples):
    """Rank r runs the samples r, r + R, r + 2R, … of all S, and every rank gets the outputs of all, in their order.

    Args:
        samples: The S samples, alike on all R ranks.
    """

    def __init__(self, samples: Samples) -> None:
        self.samples, self.count, self.has_mean = samples, samples.count, samples.has_mean

    def chosen(self, model: nn.Module, forward: Callable[[], Tensor], indices: Iterable[int]) -> Tensor:
        """Run `forward` under some of the samples, on this rank alone."""
        return self.samples.chosen(model, forward, indices)

    def at_mean(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, `model` is the mean of the samples."""
        return self.samples.at_mean(model)

    def outputs(self, model: nn.Module, forward: Callable[[], Tensor]) -> Tensor:
        """Run `forward` under this rank's samples, and gather; a collective.

        Args:
            model: The model that `forward` uses.
            forward: Computes the model's output from a batch that all ranks have.

        Returns:
            Outputs stacked over all samples, ``[S, …]``.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        turns = -(-self.count // world_size)
        # Where S is not a multiple of R, the last turn repeats samples, so that all ranks gather alike.
        mine = self.chosen(model, forward, [(rank + turn * world_size) % self.count for turn in range(turns)])
        gathered = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(gathered, mine.contiguous())
        return torch.stack(gathered, 1).flatten(0, 1)[: self.count]


def spread(trainer: Trainer, samples: Samples) -> Samples:
    """Spread evaluation over ranks where every rank has the same examples, `BayesDDPStrategy` with ``mode="samples"``.

    Args:
        trainer: The trainer.
        samples: The samples.

    Returns:
        The samples, spread or as they were.
    """
    strategy = trainer.strategy
    if isinstance(strategy, BayesDDPStrategy) and strategy.same_examples and trainer.world_size > 1:
        return SpreadSamples(samples)
    return samples
