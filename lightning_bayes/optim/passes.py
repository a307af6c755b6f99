"""The passes of one update, and the measurement that they add up to.

The passes between two updates may be weight samples, micro-batches, or both. Their gradients add up in ``param.grad`` as in
plain PyTorch, so accumulation keeps its meaning, whether a loop divides its losses by the number of micro-batches or not.
Only the K weight samples of a batch (`mc_samples`) are averaged:

    g = (1/K) Σ_p g_p

Curvatures and the gradients of summed losses are weighted by the number of examples, so micro-batches under the same noise
equal one large batch:

    ĥ = Σ_p n_p ĥ_p / Σ_p n_p

Gradient clipping finds g in ``param.grad``. Under a GradScaler it stays scaled until the scaler divides. ĥ is that of the
mean loss. It is never scaled, and a loop's division by the number of micro-batches is undone (`curvature.host_division`).

The number of examples also converts the gradient of a summed loss to that of the mean, except where another optimizer moves
the means: it gets the gradient of the loss as it is. A pass without curvature skips
counting the examples and reading the loss if the number cancels: the update has a single batch, the last loss read was a
mean, and the first ten updates are done. The model then runs without any hook.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bayes.curvature import Capture
from lightning_bayes.curvature.selection import requires_grad_as
from lightning_bayes.errors import NoMeasurementError, UnsupportedTrainingError
from lightning_bayes.optim.diagonal.estimators import CurvatureEstimator
from lightning_bayes.optim.finished_pass import BarePass, Curvature, FinishedPass, rescaled
from lightning_bayes.optim.groups import KEY
from lightning_bayes.optim.loss_notes import LossNotes
from lightning_bayes.optim.noise import CounterNoise
from lightning_bayes.optim.step_changes import change_means
from lightning_bayes.private_torch import version_of


@dataclass
class OpenUpdate:
    """Running averages over the passes since the last update."""

    means: dict[nn.Parameter, Tensor] | None = None  # μ of the parameters that hold a sample now; None outside a pass
    num_opened: int = 0  # number of passes opened
    samples: set[int] = field(default_factory=set)  # indices of the weight samples
    share: float | None = None  # weight of the running pass's gradient, where its host states it
    num_passes: int = 0  # number of passes with gradients
    examples: float = 0.0  # Σ_p n_p; a pass whose examples are not counted has weight 1
    sample_priors: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # mean δ̃ (θ - μ) of the passes so far
    divisors: frozenset[int] = frozenset()  # by which the training loop may have divided the loss of every pass
    curvature: Curvature = field(default_factory=dict)  # mean ĥ so far, by the keys of the estimator
    loss: Tensor | None = None  # mean loss so far; None before the first observed loss
    moved: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # means that a pass has moved itself
    buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # with their values before the first pass
    to_measure: Mapping[Hashable, Tensor] | None = None  # as in `PosteriorFamily`; None before the first pass
    is_counted: bool = True  # whether the examples of all passes were counted
    keeps_sums: bool = False  # whether g is the gradient of the loss as it is, also of a sum
    has_sums: bool = False  # whether a loss is a sum over its examples
    summed: float | Tensor = 1.0  # mean number of examples whose losses a pass adds up; 1 for a mean
    is_only_batch: bool = False  # whether all passes use the same batch
    always_measures: bool = False  # whether the update measures even if no measurement is due
    is_discarded: bool = False  # whether the next step does nothing
    is_averaged_by_host: bool = False  # whether a host averages the measurement over processes
    final_curvature: Curvature | None = None  # the finalised ĥ, which a host may average; None before it is needed

    def add(
        self,
        finished: FinishedPass,
        grads: Mapping[nn.Parameter, Tensor | None],
        curvature: Curvature,
        mc_samples: int,
    ) -> None:
        """Add a pass to the averages; `grads` were g before it."""
        captured = finished.captured
        n, factor = captured.num_examples, captured.gradient_factor
        weight, (old, new) = n / (self.examples + n), self.weights(captured, mc_samples)
        self.summed += (1 / factor - self.summed) / (self.num_passes + 1)
        if self.num_passes or new != 1:
            for param, before in grads.items():
                param.grad = _weighted_sum(before if self.num_passes else None, param.grad, old, new)
        for key in {**self.curvature, **curvature} if self.num_passes else ():
            total = _weighted_sum(self.curvature.get(key), curvature.get(key), 1 - weight, weight)
            assert total is not None
            self.curvature[key] = total
        if not self.num_passes:
            self.curvature, self.divisors = curvature, captured.divisors
        if self.num_passes or factor != 1:
            self.loss = _weighted_sum(self.loss, captured.loss, 1 - weight, weight * factor)
        else:
            self.loss = captured.loss
        self.divisors &= captured.divisors
        self.examples += n
        self.num_passes += 1
        self.samples.add(finished.sample)
        self.is_counted &= not isinstance(captured, BarePass)
        self.has_sums |= isinstance(captured, Capture) and captured.scale.reduction != "mean"
        self.final_curvature = None

    def weights(self, captured: Capture | BarePass, mc_samples: int) -> tuple[float, float]:
        """The weights of g and of the next pass's gradient: K passes are averaged, and the averages add up."""
        n, factor = captured.num_examples, captured.gradient_factor
        if factor != 1 and not self.keeps_sums:
            weight = n / (self.examples + n)  # g is the mean over the examples whose losses were added up
            return 1 - weight, weight * factor
        if self.share is not None:
            return 1.0, self.share
        count = self.num_passes + 1
        return ((count - 1) / count, 1 / count) if count <= mc_samples else (1.0, 1 / mc_samples)

    def prior_term(self, param: nn.Parameter, term: Tensor, weights: tuple[float, float]) -> Tensor:
        """What to add to the next pass's gradient so that g contains the mean of δ̃ (θ - μ), `term`, over all passes."""
        old, new = weights
        before, count = self.sample_priors.get(param), self.num_passes + 1
        self.sample_priors[param] = term if before is None else torch.lerp(before, term, 1 / count)
        if self.share is not None or old != 1 or before is None:
            return term
        return (term - before) / (count * new)

    def host_divisor(self, mc_samples: int) -> int:
        """The number of micro-batches if the training loop has divided their losses by it; else 1."""
        batches = self.num_passes // mc_samples
        return batches if batches in self.divisors else 1

    def finalised(
        self, estimator: CurvatureEstimator, groups: Sequence[Mapping[str, Any]], mc_samples: int
    ) -> Curvature:
        """ĥ from the averages over passes, for all that is measured and in the same order in all processes."""
        curvature, measured = self.curvature, self.to_measure
        if self.divisors:
            curvature = rescaled(curvature, self.host_divisor(mc_samples), estimator.degree_of)
        if measured and not estimator.is_linear:
            curvature = estimator.finalise(curvature, groups, self.examples)
        if measured is not None:
            shapes = measured.items()
            curvature = {key: curvature[key] if key in curvature else torch.zeros_like(v) for key, v in shapes}
        return curvature

    def require_passes(self, optimizer: str, *, is_hosted: bool) -> None:
        """Require a measured pass, which a host has averaged over the processes that train together."""
        if not self.examples:
            advice = "Run forward and backward inside `with opt.sampled_params():` first, or pass a closure."
            if is_hosted:
                advice = "In LightningModule.optimizer_step, call optimizer.step(closure=optimizer_closure)."
            raise NoMeasurementError(f"{optimizer}.step() was called without measured gradients. {advice}")
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if processes > 1 and not self.is_averaged_by_host:
            raise UnsupportedTrainingError(
                f"{processes} processes train together, but their measurements have not been averaged, so they "
                "would drift apart. Call lightning_bayes.strategies.all_reduce_mean_(*opt.collect()) before opt.step(), "
                "and run the passes under `with ddp_model.no_sync(), opt.sampled_params(rank):`."
            )

    def clear(self) -> None:
        """Discard all passes."""
        # In place: in manual optimization Lightning's wrapper copies the optimizer's attributes and must see the change.
        vars(self).update(vars(OpenUpdate()))


def for_plain_mean_(summed: Tensor, grads: Iterable[Tensor]) -> None:
    """Scale gradients of sums over `summed` examples so that a mean weighted by examples is their plain mean.

    Plain training in several processes takes the plain mean of such gradients; `summed` becomes the processes' mean too.
    """
    if dist.is_available() and dist.is_initialized():
        own = summed.clone()
        dist.all_reduce(summed)
        summed.div_(dist.get_world_size())
        torch._foreach_mul_(list(grads), float(summed / own))


class MeasuredOptimizer(Protocol):
    """What a pass needs of an optimizer; see `NoisyOptimizer`."""

    model: nn.Module
    notes: LossNotes
    mc_samples: int
    draw_sample: Callable[[CounterNoise], dict[nn.Parameter, Tensor]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""

    @property
    def num_updates(self) -> int:
        """Number of updates so far, the counter of the noise."""

    def trained(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        """The parameters that are trainable now, with their groups."""

    def capture_pass(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture | BarePass]:
        """The capture of one pass, to be entered around forward and backward."""

    def read_pass(self, finished: FinishedPass) -> Curvature:
        """Read ĥ of a pass."""


@contextmanager
def at_sample(optimizer: MeasuredOptimizer, update: OpenUpdate, sample: int) -> Iterator[None]:
    """Replace the means by the weight sample with this index, and restore them on exit.

    What the pass itself changes in its sample changes the mean likewise; see `step_changes`.
    """
    settings, means = optimizer.param_groups[0][KEY], dict[nn.Parameter, Tensor]()
    seed, is_paired = int(settings["noise_seed"]), bool(settings.get("antithetic"))
    noise = partial(CounterNoise, seed, optimizer.num_updates, sample, antithetic=is_paired)
    update.means = means  # marked as open first, so that nesting is refused
    try:
        with torch.no_grad():
            drawn = optimizer.draw_sample(noise())
            means.update((param, param.data) for param in drawn)
            for param, value in drawn.items():
                param.data = value  # swapping the storage avoids copying every weight
        flags = {param: param.requires_grad for param in optimizer.model.parameters()}
        marks = {param: (version_of(param), param.data_ptr()) for param in flags}
        yield
        now = ((param, (version_of(param), param.data_ptr())) for param in optimizer.model.parameters())
        ends = {param: param.data for param, mark in now if optimizer.notes.writes_data or marks.get(param) != mark}
    finally:
        for param, mean in means.items():
            param.data = mean
        update.means = None
    if ends:
        with requires_grad_as(flags):  # as when the pass drew its sample
            change_means(means, ends, optimizer.draw_sample(noise()))
        update.moved.update((param, means[param]) for param in ends if param in means)


@contextmanager
def open_pass(
    optimizer: MeasuredOptimizer, update: OpenUpdate, sample: int, *, loss_scale: float, watch_backward: bool
) -> Iterator[Capture | BarePass]:
    """Run a pass at a weight sample and add it to the update; yields the capture, which observes the loss."""
    if not update.examples:  # BatchNorm statistics, to be restored after a non-finite batch
        update.buffers = [(buffer, buffer.detach().clone()) for buffer in optimizer.model.buffers()]
    before = {param: param.grad for _, param in optimizer.trained()}
    try:
        for param in before:
            param.grad = None
        capture = optimizer.capture_pass(sample, loss_scale)
        with at_sample(optimizer, update, sample):
            with capture as captured, ExitStack() as undo:
                if watch_backward and not isinstance(captured, BarePass):
                    captured.tape.observe = undo.enter_context(
                        optimizer.notes.noting(optimizer.model, captured.observe)
                    )
                yield captured
            if captured.squares or any(param.grad is not None for param in before):
                if not isinstance(captured, BarePass):
                    captured.close()
                finished = FinishedPass(captured, sample, loss_scale, update.means or {})
                with torch.no_grad():
                    curvature = optimizer.read_pass(finished)
                    update.add(finished, before, curvature, optimizer.mc_samples)
                if not isinstance(captured, BarePass):
                    optimizer.notes.is_mean = captured.shows_mean
                    if captured.tape.data_storages:
                        optimizer.notes.note_written(captured.tape.data_storages, before)
            else:  # sampled, not differentiated
                _restore(before)
    except BaseException:
        _restore(before)
        raise


def _restore(grads: Mapping[nn.Parameter, Tensor | None]) -> None:
    for param, grad in grads.items():
        param.grad = grad


def _weighted_sum(old: Tensor | None, new: Tensor | None, old_weight: float, weight: float) -> Tensor | None:
    """old_weight · old + weight · new; a missing tensor counts as zero."""
    if new is None:
        return None if old is None else old.mul_(old_weight)
    if old is None:
        return new if weight == 1 else new.mul_(weight)
    return old.mul_(old_weight).add_(new, alpha=weight)
