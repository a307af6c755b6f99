"""The Monte-Carlo closure: K × (draw weights → training_step → backward → restore the mean), then one reduction.

It replaces Lightning's closure, which the optimizer calls once, so accumulation, clipping, AMP's scaler and ``global_step``
keep their meaning. An optimizer that called Lightning's closure K times would count the last micro-batch K times under
accumulation, and under a GradScaler it would get no closure at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch.nn.parallel import DistributedDataParallel

from lightning_bayes.callbacks.trainer.private_lightning import ClosureParts
from lightning_bayes.curvature import Capture, with_per_example_loss
from lightning_bayes.curvature.loss import KEY as PER_EXAMPLE_LOSSES
from lightning_bayes.optim import NoisyOptimizer
from lightning_bayes.predictive.repeated import copied
from lightning_bayes.strategies import BayesDDPStrategy, all_reduce_mean_

_OF_FIT = ("_trainer", "_mc_samples", "_start_epoch", "_is_tuned", "_has_started", "_optimizer", "on_first_capture")


class MonteCarloClosure(Closure):
    """Runs the batches of a fit, each under K weight samples.

    Args:
        trainer: The trainer of the fit.
        mc_samples: K.
        start_epoch: Called before the first batch of an epoch, and of the fit.
        is_tuned: Whether a tuner trains. Every update then measures, as at the largest batch that the tuner tries.
    """

    _optimizer: NoisyOptimizer  # once it has replaced the user's

    def __init__(
        self,
        trainer: Trainer,
        mc_samples: int,
        start_epoch: Callable[[MonteCarloClosure], None],
        is_tuned: Callable[[], bool],
    ) -> None:
        self._trainer, self._mc_samples = trainer, mc_samples
        self._start_epoch, self._is_tuned, self._has_started = start_epoch, is_tuned, False
        self.on_first_capture: Callable[[Capture], None] | None = None  # of the first pass that has a loss

    def __getstate__(self) -> dict[str, Any]:
        """What belongs to the fit; a copy of the trainer gets its next batch from its own loop."""
        return {name: value for name, value in vars(self).items() if name in _OF_FIT}

    def use(self, optimizer: NoisyOptimizer) -> None:
        """Take the optimizer that has replaced the user's."""
        self._optimizer, self._has_started, self.on_first_capture = optimizer, False, None

    def of_batch(self, parts: ClosureParts) -> MonteCarloClosure:
        """Take over what Lightning's closure of the next batch runs."""
        super().__init__(parts.step, parts.backward, parts.zero_grad)
        self._parts = parts
        if not self._has_started or self._trainer.fit_loop.epoch_loop.batch_idx == 0:
            self._has_started = True
            self._start_epoch(self)
        return self

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Run the passes and average their gradients, also over processes if a step follows."""
        backward, zero_grad = self._parts.backward, self._parts.zero_grad
        if backward is None:  # StochasticWeightAveraging collects BatchNorm statistics, at the mean
            self._optimizer.discard_passes()
            return super().closure(*args, **kwargs)
        if zero_grad is not None:
            zero_grad()
        indices = noise_samples(self._trainer, self._mc_samples)
        kept = copied(self._parts.arguments) if len(indices) > 1 else {}
        results = list[ClosureResult]()
        for index in indices:
            if results:
                self._parts.arguments.update(copied(kept))  # a step may change its batch in place
            results.append(self._run_pass(index, len(indices), backward))
        if self._parts.step_follows and dist.is_available() and dist.is_initialized():
            self._average_over_processes()
        losses = [result.loss for result in results if result.loss is not None]
        if not losses:
            if self._parts.step_follows:
                self._optimizer.discard_passes(if_empty=True)  # no update, as in plain Lightning
            self.warning_cache.warn("`training_step` returned `None`. If this was on purpose, ignore this warning...")
            return results[0]
        first = next(result for result in results if result.loss is not None)
        first.loss = torch.stack(losses).mean()
        return first

    def _run_pass(self, index: int, num_passes: int, backward: Callable[[torch.Tensor], Any]) -> ClosureResult:
        trainer = self._trainer
        block_sync = getattr(trainer.strategy, "block_backward_sync", nullcontext)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        loss_scale = scaler.get_scale() if scaler is not None else 1.0
        micro_batches = trainer.accumulate_grad_batches
        is_only_batch = micro_batches == 1 and trainer.world_size == 1
        measured_pass = self._optimizer.measured_pass(
            index,
            loss_scale=loss_scale,
            is_only_batch=is_only_batch,
            always_measures=self._is_tuned(),
            share=None if micro_batches == 1 else 1 / (micro_batches * num_passes),
        )
        model = trainer.strategy.model
        reducer = without_reducer(model) if isinstance(model, DistributedDataParallel) else nullcontext()
        with reducer, block_sync(), measured_pass as captured:
            result = self._parts.step()
            if result.closure_loss is not None:
                loss, losses = result.closure_loss, result.extra.get(PER_EXAMPLE_LOSSES)
                if losses is not None:
                    result.extra[PER_EXAMPLE_LOSSES] = losses.detach()
                    loss = with_per_example_loss(loss, losses)
                captured.observe(loss, divided_by_host=True)
                # Measure the mean loss, without Lightning's division by the number of micro-batches; `share` divides by it.
                backward(result.closure_loss * micro_batches)
        if self.on_first_capture is not None and result.closure_loss is not None:
            self.on_first_capture(captured)
            self.on_first_capture = None
        return result

    def _average_over_processes(self) -> None:
        strategy, optimizer = self._trainer.strategy, self._optimizer
        reduce: Callable[[list[torch.Tensor], float], Any] = all_reduce_mean_
        add_noise_group = None
        if isinstance(strategy, BayesDDPStrategy):
            reduce = strategy.all_reduce_mean_
            add_noise_group = strategy.add_noise_group_ if strategy.shares_noise else None
        tensors, examples = optimizer.collect(add_noise_group)
        if examples:
            reduce([*tensors, *(b for b in optimizer.model.buffers() if b.is_floating_point())], examples)


@contextmanager
def without_reducer(model: DistributedDataParallel) -> Iterator[None]:
    """Context in which DDP's forward does not prepare its own reduction, which no pass uses.

    Under ``find_unused_parameters`` and ``static_graph`` it wraps the loss, which hides how the loss was computed, and its
    backward expects the reduction.
    """
    flags = [name for name in ("find_unused_parameters", "static_graph") if getattr(model, name)]
    for name in flags:
        setattr(model, name, False)
    try:
        yield
    finally:
        for name in flags:
            setattr(model, name, True)


def noise_samples(trainer: Trainer, mc_samples: int) -> list[int]:
    """The indices, which seed the noise, of the passes over the current batch; the micro-batches of an update share them."""
    if isinstance(trainer.strategy, BayesDDPStrategy):
        micro_batches = trainer.accumulate_grad_batches
        micro_batch = trainer.fit_loop.epoch_loop.batch_idx % micro_batches
        return trainer.strategy.noise_samples(mc_samples, micro_batch, micro_batches)
    return [trainer.global_rank * mc_samples + k for k in range(mc_samples)]
