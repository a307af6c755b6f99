"""Splits evaluation samples among processes that see the same examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_bayes.callbacks.trainer.loaders import sum_over_processes
from lightning_bayes.likelihood.paths import mapped
from lightning_bayes.predictive import Samples
from lightning_bayes.strategies import BayesDDPStrategy


class SpreadSamples(Samples):
    """Rank r of R runs the samples r, r + R, …, and every rank gathers the outputs of all S samples in order."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.count, self.has_mean = samples, samples.count, samples.has_mean

    def subset_outputs(self, model: nn.Module, forward: Callable[[], Any], indices: Iterable[int]) -> Any:
        """Run `forward` under the samples of the given indices, on this rank alone."""
        return self.samples.subset_outputs(model, forward, indices)

    def at_mean(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which `model` has the mean of the samples."""
        return self.samples.at_mean(model)

    def sampled(self, model: nn.Module, index: int) -> AbstractContextManager[None]:
        """Context in which `model` is a sample."""
        return self.samples.sampled(model, index)

    def outputs(self, model: nn.Module, forward: Callable[[], Any]) -> Any:
        """Run `forward` under this rank's samples and gather all outputs. All ranks must call this together."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        rounds = math.ceil(self.count / world_size)
        # If S is not a multiple of R, the last round repeats samples, so that all ranks gather the same shape.
        indices = [(rank + i * world_size) % self.count for i in range(rounds)]
        outputs = self.subset_outputs(model, forward, indices)
        return mapped(lambda leaf: self._gathered(leaf, world_size) if isinstance(leaf, Tensor) else leaf, outputs)

    def _gathered(self, outputs: Tensor, world_size: int) -> Tensor:
        """The outputs of all samples in order."""
        gathered = [torch.empty_like(outputs) for _ in range(world_size)]
        dist.all_gather(gathered, outputs.contiguous())
        return torch.stack(gathered, 1).flatten(0, 1)[: self.count]


def spread(trainer: Trainer, samples: Samples) -> Samples:
    """The samples, split among ranks under `BayesDDPStrategy` with ``mode="samples"``, else unchanged."""
    return SpreadSamples(samples) if _see_same_examples(trainer) else samples


def distinct_sum(trainer: Trainer, module: LightningModule) -> Callable[[Tensor], Tensor]:
    """A function that sums a tensor over processes with examples of their own."""
    return (lambda total: total) if _see_same_examples(trainer) else sum_over_processes(trainer, module)


def _see_same_examples(trainer: Trainer) -> bool:
    strategy = trainer.strategy
    return isinstance(strategy, BayesDDPStrategy) and strategy.same_examples and trainer.world_size > 1
