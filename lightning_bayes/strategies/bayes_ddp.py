"""Distributed training with weight samples: which rank draws which noise and sees which examples.

Noise is a function of a number (`optim.runtime.noise`): ranks of one noise group draw the same weights by using the same
numbers, without communication. With V = world size × micro-batches per update, a micro-batch of a rank is number
v = rank · micro-batches + micro-batch, and belongs to group ⌊v · groups / V⌋. A rank with one micro-batch per update is
the process of Osawa et al. 2019 (https://arxiv.org/abs/1906.02506), Algorithm 1; with more micro-batches fewer devices
take the place of many.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, get_args

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor

from lightning_bayes.errors import HyperparameterError, RankError
from lightning_bayes.strategies.agreement import check_agreement
from lightning_bayes.strategies.reduce import all_reduce_mean_, all_reduce_sum_
from lightning_bayes.strategies.sigterm import DeferredSigterm
from lightning_bayes.strategies.unresponsive_ranks import is_of_collective, unresponsive_ranks

_log = logging.getLogger(__name__)
Mode: TypeAlias = Literal["data", "samples"]


class BayesDDPStrategy(DDPStrategy):
    """DDP for the callbacks of this package: ``Trainer(strategy="bayes_ddp")``.

    Gradient and curvature of an update are averaged over ranks in one reduction, by numbers of examples; a measurement
    that is not finite on one rank is not finite on any, so all skip the update together. A SIGTERM to one rank is shared in
    the same reduction, and all ranks end after the same update.

    Args:
        mode: ``"data"``: the examples are divided among the ranks. ``"samples"``: all noise groups see the same examples,
            which are divided among the ranks of a group; by default every rank is a group, so K samples on each of R ranks
            are KR samples of one batch.
        num_groups: Noise groups: passes of one group have the same weight samples, those of different groups have
            different ones. None: every rank is a group. More groups than ranks need ``accumulate_grad_batches``: the
            micro-batches of an update are then in different groups, as if each were on a rank of its own.
        bucket_mib: Most MiB in one collective.
        answer_seconds: How long ranks wait for each other's answer after a collective has failed, before the error names
            those that are unresponsive.
        **arguments: See Lightning's ``DDPStrategy``, such as ``timeout`` and ``process_group_backend``.

    Attributes:
        reduced_bytes: Bytes that this rank gave to the last reduction; None before the first.

    Raises:
        HyperparameterError: If an argument lies outside of its range.
    """

    strategy_name = "bayes_ddp"

    def __init__(
        self,
        mode: Mode = "data",
        num_groups: int | None = None,
        bucket_mib: float = 256.0,
        answer_seconds: float = 10.0,
        **arguments: Any,
    ) -> None:
        if mode not in get_args(Mode):
            raise HyperparameterError(f"mode={mode!r} is unknown. Choose from {', '.join(get_args(Mode))}.")
        if num_groups is not None and num_groups < 1:
            raise HyperparameterError(f"num_groups={num_groups} must be at least 1, or None for a group per rank.")
        for name, value in {"bucket_mib": bucket_mib, "answer_seconds": answer_seconds}.items():
            if not value > 0:
                raise HyperparameterError(f"{name}={value} must be above 0.")
        super().__init__(**arguments)
        self.mode, self.num_groups = mode, num_groups
        self.bucket_mib, self.answer_seconds = bucket_mib, answer_seconds
        self.reduced_bytes: int | None = None
        self._noise_group: Any = None  # a process group
        self._sigterm = DeferredSigterm()

    @property
    def _groups(self) -> int:
        return self.world_size if self.num_groups is None else self.num_groups

    def noise_samples(self, mc_samples: int, micro_batch: int = 0, micro_batches: int = 1) -> list[int]:
        """Assign noise to this rank's passes over one of its batches.

        Args:
            mc_samples: K, passes over the batch.
            micro_batch: Which of the update's batches on this rank, from 0.
            micro_batches: How many batches an update has on each rank.

        Returns:
            K numbers of noise, those of this rank's group.

        Raises:
            HyperparameterError: If the groups would not be of equal size.
        """
        groups = self._groups
        passes = self.world_size * micro_batches
        if passes % groups:
            raise HyperparameterError(
                f"num_groups={groups} does not divide the {passes} batches of an update ({self.world_size} ranks with "
                f"accumulate_grad_batches={micro_batches}), so the groups would not be of equal size. Choose a divisor."
            )
        group = (self.global_rank * micro_batches + micro_batch) * groups // passes
        return [group * mc_samples + k for k in range(mc_samples)]

    @property
    def shares_noise(self) -> bool:
        """Whether noise groups reach over several ranks, so that `add_noise_group_` has something to add."""
        return self._groups % self.world_size != 0

    @property
    def same_examples(self) -> bool:
        """Whether all ranks see the same examples."""
        return self.mode == "samples" and self._groups == self.world_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of parts that Lightning's sampler divides the data into, and this rank's part.

        Raises:
            HyperparameterError: If ``mode="samples"`` has ranks that make no equal groups.
        """
        if self.mode == "data":
            return super().distributed_sampler_kwargs
        groups = self._groups
        if self.world_size % groups:
            raise HyperparameterError(
                f'mode="samples" needs num_groups that divides the {self.world_size} ranks, not {groups}. Choose a divisor, '
                "or leave it out."
            )
        ranks_of_group = self.world_size // groups
        return {"num_replicas": ranks_of_group, "rank": self.global_rank % ranks_of_group}

    def all_reduce_mean_(self, tensors: Sequence[Tensor], weight: float) -> None:
        """Replace `tensors` by their weighted mean over ranks, see `strategies.all_reduce_mean_`.

        Args:
            tensors: Floating-point tensors, alike on all ranks.
            weight: Weight of this rank. If another rank is gone or does not answer, a `RankError` names it.
        """
        if self.world_size == 1:
            self.reduced_bytes = 0
            return
        self._sigterm.defer()
        flag = self._sigterm.flag(tensors[0].device)
        with self._named_ranks():
            self.reduced_bytes = all_reduce_mean_([*tensors, flag], weight, bucket_mib=self.bucket_mib)
        self._sigterm.update(flag)

    def optimizer_step(self, *arguments: Any, **named: Any) -> Any:
        """Step, see Lightning's ``Strategy``; then all ranks end together if one of them has received SIGTERM.

        Args:
            *arguments: As there.
            **named: As there.

        Returns:
            What the optimizer returns.
        """
        output = super().optimizer_step(*arguments, **named)
        self._sigterm.deliver()
        return output

    def all_reduce_sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace `tensors` by their sums over ranks, see `strategies.all_reduce_sum_`.

        Args:
            tensors: Floating-point tensors, alike on all ranks.
        """
        with self._named_ranks():
            all_reduce_sum_(tensors, bucket_mib=self.bucket_mib)

    def add_noise_group_(self, tensors: Sequence[Tensor]) -> None:
        """Replace `tensors` by their sums over the ranks that draw the same noise as this one.

        What squares the mean gradient of a weight sample needs this before the reduction: Vadam and its kin.

        Args:
            tensors: Floating-point tensors, alike on all ranks.

        Raises:
            HyperparameterError: If a rank has some but not all batches of a noise group.
        """
        if not self.shares_noise:
            return
        if self.world_size % self._groups:
            raise HyperparameterError(
                f"num_groups={self._groups} puts batches of one of the {self.world_size} ranks into several noise groups, "
                "and those of one group on several ranks, which methods that square a group's gradient cannot add up. "
                f"Choose a multiple or a divisor of {self.world_size}."
            )
        with self._named_ranks():
            all_reduce_sum_(tensors, self._process_group())

    def _process_group(self) -> Any:
        """The processes of this rank's noise group; the first call makes the groups, on all ranks at once."""
        if self._noise_group is None:
            size = self.world_size // self._groups
            members = [list(range(first, first + size)) for first in range(0, self.world_size, size)]
            self._noise_group, _ = dist.new_subgroups_by_enumeration(members)
        return self._noise_group

    def check_agreement(self, settings: Mapping[str, object]) -> None:
        """Require equal settings on all ranks, the strategy's own among them.

        Args:
            settings: Values by name.
        """
        own = {"mode": self.mode, "num_groups": self.num_groups, "bucket_mib": self.bucket_mib}
        check_agreement({**settings, **own})

    def on_train_end(self) -> None:
        """Stop deferring SIGTERM."""
        super().on_train_end()
        self._sigterm.stop()

    def teardown(self) -> None:
        """Forget the process group of the noise, which ends with the others."""
        self._sigterm.stop()
        super().teardown()
        self._noise_group = None

    def on_exception(self, exception: BaseException) -> None:
        """Name the ranks that are gone, where another collective than the reduction has failed.

        Args:
            exception: The exception that ended the run.
        """
        self._sigterm.stop()
        super().on_exception(exception)
        message = self._who_is_gone(exception)
        if message is not None:
            _log.error(message)

    @contextmanager
    def _named_ranks(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            message = self._who_is_gone(error)
            if message is None:
                raise
            raise RankError(message) from error

    def _ended_children(self) -> list[int]:
        """Ranks that Lightning has started from this one and that have ended; with torchrun or SLURM it starts none."""
        # Lightning looks for them every five seconds and then kills this process: there is no time to wait for answers.
        processes = getattr(self.launcher, "procs", [])
        first = self.node_rank * self.num_processes
        return [first + place for place, process in enumerate(processes, 1) if process.poll() is not None]

    def _who_is_gone(self, error: BaseException) -> str | None:
        silent = unresponsive_ranks(self.answer_seconds, self._ended_children) if is_of_collective(error) else []
        if not silent:
            return None
        names = f"Rank {silent[0]} does" if len(silent) == 1 else f"Ranks {', '.join(map(str, silent))} do"
        return (
            f"{names} not answer (of {self.world_size} ranks; seen on rank {self.global_rank}: "
            f"{str(error).splitlines()[0]}). It was killed, ran out of memory, or hangs: look into its output. Several are "
            "silent where others still wait for one that is gone. To go on, start all ranks again with ckpt_path=..."
        )


if BayesDDPStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        BayesDDPStrategy.strategy_name, BayesDDPStrategy, description="DDP for lightning_bayes: data, samples, groups"
    )
