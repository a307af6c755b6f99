"""Distributed training with weight samples: assigns noise and examples to ranks.

Noise is a function of a noise index (`optim.noise`). Ranks of one noise group draw the same weights by using the
same indices, without communication. With V = world size × micro-batches per update, a micro-batch has the index
v = rank · micro-batches + micro-batch and belongs to group ⌊v · groups / V⌋. A rank with one micro-batch per update is one
process of Algorithm 1 in Osawa et al. 2019 (https://arxiv.org/abs/1906.02506); more micro-batches emulate more devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.strategies.reduce import all_reduce_mean_, all_reduce_sum_, check_agreement

Mode: TypeAlias = Literal["data", "samples"]


class BayesDDPStrategy(DDPStrategy):
    """DDP for the callbacks of this package: ``Trainer(strategy="bayes_ddp")``.

    One reduction per update averages gradient and curvature over ranks, weighted by the number of examples. A non-finite
    measurement on one rank becomes non-finite on all ranks, so they skip the update together.

    Args:
        mode: ``"data"``: the examples are divided among the ranks. ``"samples"``: all noise groups see the same examples,
            which are divided among the ranks of a group. By default every rank is a group, so K samples on each of R ranks
            are KR samples for one batch.
        num_groups: Number of noise groups. Passes of one group use the same weight samples; different groups use different
            samples. None makes every rank a group. More groups than ranks require ``accumulate_grad_batches``: the
            micro-batches of an update are then in different groups, as if each ran on a separate rank.
        bucket_mib: Maximum MiB per collective.
        **arguments: Arguments of Lightning's ``DDPStrategy``, such as ``timeout`` and ``process_group_backend``.

    Attributes:
        reduced_bytes: Bytes that this rank contributed to the last reduction; None before the first.

    Raises:
        HyperparameterError: If an argument is out of range.
    """

    strategy_name = "bayes_ddp"

    def __init__(
        self,
        mode: Mode = "data",
        num_groups: int | None = None,
        bucket_mib: float = 256.0,
        **arguments: Any,
    ) -> None:
        if mode not in get_args(Mode):
            raise HyperparameterError(f"mode={mode!r} is unknown. Choose from {', '.join(get_args(Mode))}.")
        if num_groups is not None and num_groups < 1:
            raise HyperparameterError(f"num_groups={num_groups} must be at least 1, or None for a group per rank.")
        if not bucket_mib > 0:
            raise HyperparameterError(f"bucket_mib={bucket_mib} must be above 0.")
        super().__init__(**arguments)
        self.mode, self.num_groups = mode, num_groups
        self.bucket_mib = bucket_mib
        self.reduced_bytes: int | None = None
        self._noise_group: Any = None  # a process group

    @property
    def _groups(self) -> int:
        return self.world_size if self.num_groups is None else self.num_groups

    def noise_samples(self, mc_samples: int, micro_batch: int = 0, micro_batches: int = 1) -> list[int]:
        """K noise indices of this rank's group, for batch `micro_batch` of the `micro_batches` of an update."""
        groups = self._groups
        passes = self.world_size * micro_batches
        if passes % groups:
            raise HyperparameterError(
                f"num_groups={groups} does not divide the {passes} batches of an update ({self.world_size} ranks with "
                f"accumulate_grad_batches={micro_batches}), so the groups would have unequal sizes. Choose a divisor."
            )
        group = (self.global_rank * micro_batches + micro_batch) * groups // passes
        return [group * mc_samples + k for k in range(mc_samples)]

    @property
    def shares_noise(self) -> bool:
        """Whether noise groups span several ranks, so that `add_noise_group_` communicates."""
        return self._groups % self.world_size != 0

    @property
    def same_examples(self) -> bool:
        """Whether all ranks see the same examples."""
        return self.mode == "samples" and self._groups == self.world_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of parts into which Lightning's sampler divides the data, and the index of this rank's part."""
        if self.mode == "data":
            return super().distributed_sampler_kwargs
        groups = self._groups
        if self.world_size % groups:
            raise HyperparameterError(
                f'mode="samples" needs num_groups that divides the {self.world_size} ranks, not {groups}. Choose a divisor '
                "or omit it."
            )
        ranks_of_group = self.world_size // groups
        return {"num_replicas": ranks_of_group, "rank": self.global_rank % ranks_of_group}

    def all_reduce_mean_(self, tensors: Sequence[Tensor], weight: float) -> None:
        """Replace `tensors` by their weighted mean over ranks."""
        self.reduced_bytes = all_reduce_mean_(tensors, weight, bucket_mib=self.bucket_mib)

    def add_noise_group_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over the noise group, as methods that square the mean gradient of a sample need."""
        if not self.shares_noise:
            return
        if self.world_size % self._groups:
            raise HyperparameterError(
                f"num_groups={self._groups} puts batches of one of the {self.world_size} ranks into several noise "
                "groups, some of which span several ranks. Methods that square the gradient of a group do not support this. "
                f"Choose a multiple or a divisor of {self.world_size}."
            )
        all_reduce_sum_(tensors, self._process_group())

    def _process_group(self) -> Any:
        """The process group of this rank's noise group. The first call creates all groups and must run on all ranks."""
        if self._noise_group is None:
            size = self.world_size // self._groups
            members = [list(range(first, first + size)) for first in range(0, self.world_size, size)]
            self._noise_group, _ = dist.new_subgroups_by_enumeration(members)
        return self._noise_group

    def check_agreement(self, settings: Mapping[str, object]) -> None:
        """Require equal values of `settings` and of the strategy's own settings on all ranks."""
        strategy_settings = {"mode": self.mode, "num_groups": self.num_groups, "bucket_mib": self.bucket_mib}
        check_agreement({**settings, **strategy_settings})

    def teardown(self) -> None:
        """Tear down, and drop the process group of the noise."""
        super().teardown()
        self._noise_group = None


if BayesDDPStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        BayesDDPStrategy.strategy_name, BayesDDPStrategy, description="DDP for lightning_bayes: data, samples, groups"
    )
