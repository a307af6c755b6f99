"""Base class of all noisy optimizers: passes at sampled weights, and a step that is skipped if anything is not finite.

A pass replaces the weights by a posterior sample, runs forward and backward under the curvature engine, and restores the
mean bit for bit, also after an exception. A step averages the passes, checks that the result is finite, and updates the
posterior. Outside a pass the parameters **are** the posterior mean.

    each pass    `_capture`, `_sample`, forward and backward, `_read_pass`, `OpenUpdate.add`
    each step    `_finalise_curvature`, `OpenUpdate.measurement`, `_update_all`
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bayes.curvature import AbstractEngine, BareCapture, Capture, GradientCapture, GradientEngine
from lightning_bayes.curvature.loss import BackwardWatch
from lightning_bayes.errors import NoMeasurementError, NonFiniteError, UnsupportedTrainingError
from lightning_bayes.optim.finiteness import nonfinite_params, overflow_message, skip_message
from lightning_bayes.optim.groups import FORMAT, KEY, split
from lightning_bayes.optim.measuring import FIRST_UPDATES
from lightning_bayes.optim.noise import CounterNoise, counter_seed
from lightning_bayes.optim.passes import Curvature, FinishedPass, Measurement, OpenUpdate
from lightning_bayes.private_torch import mark_as_scheduled


class NoisyOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer over a weight posterior. Subclasses say how weights are sampled, measured and updated.

    Class attributes:
        joins_weights: Whether the posterior correlates all weights. There is then one parameter group, which is fixed.

    Args:
        model: The model to train.
        engine: Measures the curvature of passes.
        params: Parameters or parameter groups; or another optimizer, whose list of groups is then shared.
        defaults: Settings of the groups, including ``noise_seed`` and ``step``; see `optim.groups`.
        mc_samples: K, weight samples per ``step(closure)``.
        max_nonfinite_steps: Number of consecutive non-finite updates after which `step` raises `NonFiniteError`.
    """

    joins_weights: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        engine: AbstractEngine,
        params: Iterable[Any] | torch.optim.Optimizer,
        defaults: dict[str, Any],
        *,
        mc_samples: int,
        max_nonfinite_steps: int,
    ) -> None:
        self.model, self.engine = model, engine
        self.mc_samples, self.max_nonfinite_steps = mc_samples, max_nonfinite_steps
        self.skipped_steps = self.skipped_in_a_row = 0
        self.closure_opens_passes = False  # whether `step`'s closure samples the weights itself, as the callbacks' does
        self._stashed_means: dict[nn.Parameter, Tensor] | None = None  # None outside a pass
        self._open_update = OpenUpdate()
        self._gradient_engine = GradientEngine(model, engine.loss_reduction)
        defaults, self.posterior_defaults = split(defaults)
        self.groups_owner = params if isinstance(params, torch.optim.Optimizer) else None
        self._own_groups: list[dict[str, Any]] | None = []  # torch's constructor fills it
        if isinstance(params, torch.optim.Optimizer):
            super().__init__(params.param_groups, params.defaults)
            self._own_groups = None
        else:
            super().__init__(params, defaults)
        # Whether the last loss read was a mean. Part of the state, so that a resumed run opens the same kind of pass.
        self.param_groups[0]["posterior"]["loss_is_mean"] = False

    @abstractmethod
    def _capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        """The capture of one pass, to be entered around forward and backward."""

    @abstractmethod
    def _sample(self, noise: CounterNoise) -> dict[nn.Parameter, Tensor]:
        """Draw a posterior sample of the parameters to perturb, in separate memory with the same strides."""

    @abstractmethod
    def _read_pass(self, finished: FinishedPass) -> Curvature:
        """Read ĥ of a pass, for the mean loss. Passes are averaged key by key."""

    @abstractmethod
    def _finalise_curvature(self, curvature: Curvature) -> Curvature:
        """Turn averages over passes into ĥ, for all measured parameters and in the same order in all processes."""

    @abstractmethod
    def _update_all(self, measurement: Measurement) -> None:
        """Update all parameters and count the update."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups: one list, shared with the optimizer that was passed as `params` or `base`."""
        if self._own_groups is not None:
            return self._own_groups
        assert self.groups_owner is not None
        return self.groups_owner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._own_groups is not None:
            self._own_groups = groups
        elif self.groups_owner is not None:
            self.groups_owner.param_groups = groups

    def settings_for(self, param_group: Mapping[str, Any]) -> dict[str, Any]:
        """The entries under ``"posterior"`` of a new group: the defaults, and what the group states."""
        stated = dict(param_group.get(KEY, {}))
        if self.groups_owner is None:  # entries of another optimizer's group, such as betas, are not ours
            stated |= {name: param_group[name] for name in self.posterior_defaults.keys() & param_group.keys()}
        return {**self.posterior_defaults, **stated}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, to the other optimizer too if the list is shared; see `torch.optim.Optimizer`."""
        settings = self.settings_for(param_group)
        if self.groups_owner is None:
            param_group = {name: value for name, value in param_group.items() if name not in self.posterior_defaults}
        if self._own_groups is None and self.groups_owner is not None:
            self.groups_owner.add_param_group(param_group)
        else:
            super().add_param_group(param_group)
        self.param_groups[-1][KEY] = settings

    def state_dict(self) -> dict[str, Any]:
        """The state, with copies of the groups' settings; see `torch.optim.Optimizer`."""
        state = super().state_dict()
        state["param_groups"] = [{**group, KEY: dict(group[KEY])} for group in state["param_groups"]]
        return {**state, "format": FORMAT}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; see `torch.optim.Optimizer`."""
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore attributes; the groups go to the list in use."""
        groups = state.pop("param_groups", None)
        super().__setstate__(state)
        if groups is not None:
            self.param_groups = groups

    def start_groups(self) -> None:
        """Give settings and state to groups and parameters that others have added to the list of groups."""
        return

    @property
    def _fills_gradients(self) -> bool:
        """Whether a step also moves parameters without a gradient."""
        return True

    @property
    def num_updates(self) -> int:
        """Number of updates so far, the counter of the noise."""
        return max(int(group["posterior"]["step"]) for group in self.param_groups)

    def trained(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        """The parameters that are trainable now, with their groups."""
        return ((group, p) for group in self.param_groups for p in group["params"] if p.requires_grad)

    def sampled_params(self, sample: int | None = None, *, loss_scale: float = 1.0) -> AbstractContextManager[None]:
        """Open a pass: inside the context the weights are a posterior sample, and backward is measured.

        Run forward and backward inside. All passes before a `step` are averaged. Under ``torch.no_grad()`` the context only
        samples.

        Args:
            sample: Index of the noise; equal indices give equal noise until the next `step`. Default: the number of passes
                opened since the last one.
            loss_scale: ``scaler.get_scale()`` if a `torch.amp.GradScaler` scales the loss.

        Returns:
            A context manager. On exit the weights are the mean again, also after an exception.
        """
        return self.measured_pass(sample, loss_scale=loss_scale, watch_backward=True)

    @contextmanager
    def measured_pass(
        self,
        sample: int | None = None,
        *,
        loss_scale: float = 1.0,
        watch_backward: bool = False,
        is_only_batch: bool = False,
        always_measures: bool = False,
    ) -> Iterator[Any]:
        """Like `sampled_params`, for hosts that pass the loss to the capture.

        The number of examples weights a pass in the average over passes and processes, and converts the gradient of a summed
        loss to that of the mean. A pass without curvature skips counting the examples and reading the loss if the number
        cancels: the update has a single batch, the last loss read was a mean, and the first ten updates are done. The model
        then runs without any hook.

        Args:
            sample: Index of the noise.
            loss_scale: Factor on the loss.
            watch_backward: Observe every loss whose ``backward`` is called, for loops that do not call `observe`.
            is_only_batch: Whether all passes of this update, in all processes, use the same batch.
            always_measures: Whether the update measures the curvature even if no measurement is due.

        Yields:
            The capture, whose `observe` expects the loss before backward; None under ``torch.no_grad()``.

        Raises:
            UnsupportedTrainingError: If a pass is open already.
        """
        if self._stashed_means is not None:
            raise UnsupportedTrainingError("sampled_params() is open already; passes cannot be nested.")
        index = self._open_update.num_opened if sample is None else sample
        self._open_update.num_opened += 1
        self._open_update.is_only_batch = is_only_batch
        self._open_update.always_measures |= always_measures
        self.start_groups()
        if not torch.is_grad_enabled():
            with self._perturbed(index):
                yield None
            return
        if not self._open_update.examples:  # BatchNorm statistics, to be restored after a non-finite batch
            self._open_update.buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        before = {param: param.grad for _, param in self.trained()}
        try:
            for param in before:
                param.grad = None
            capture = self._capture(index, loss_scale)
            with self._perturbed(index):
                with capture as captured, _watch(captured) if watch_backward else nullcontext():
                    yield captured
                self._collect(captured, before, loss_scale, index)
        except BaseException:
            for param, grad in before.items():
                param.grad = grad
            raise

    @property
    def _reads_count(self) -> bool:
        """Whether the curvature depends on the number of examples of a pass, which then must be counted."""
        return False

    def _gradient_capture(self) -> AbstractContextManager[Capture]:
        """The capture of a pass that measures its gradient only; see `measured_pass`."""
        is_mean = bool(self.param_groups[0]["posterior"].get("loss_is_mean"))
        needs_no_count = self._open_update.is_only_batch and is_mean and self.num_updates >= FIRST_UPDATES
        needs_no_count = needs_no_count and not self._reads_count
        return self._gradient_engine.bare() if needs_no_count else self._gradient_engine.capture()

    def label_seed(self, sample: int) -> int:
        """Seed for the labels that a pass samples, given the index of its weight sample."""
        return counter_seed(
            int(self.param_groups[0]["posterior"]["noise_seed"]), self.num_updates, sample, self._open_update.num_opened
        )

    @contextmanager
    def _perturbed(self, index: int) -> Iterator[None]:
        means: dict[nn.Parameter, Tensor] = {}
        self._stashed_means = means
        try:
            with torch.no_grad():
                group = self.param_groups[0]
                is_paired = bool(group["posterior"].get("antithetic"))
                sample = self._sample(
                    CounterNoise.of_pass(
                        int(group["posterior"]["noise_seed"]), self.num_updates, index, antithetic=is_paired
                    )
                )
            means.update((p, p.data) for p in sample)
            self._set_weights_(sample)
            yield
        finally:
            self._set_weights_(means)
            self._stashed_means = None

    @torch.no_grad()
    def _set_weights_(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        for param, value in values.items():
            param.data = value  # swapping the storage avoids copying every weight

    @torch.no_grad()
    def _collect(
        self, captured: Capture, before: dict[nn.Parameter, Tensor | None], loss_scale: float, sample: int
    ) -> None:
        if not captured.squares and all(param.grad is None for param in before):  # sampled, not differentiated
            for param, grad in before.items():
                param.grad = grad
            return
        (self._gradient_engine if isinstance(captured, (GradientCapture, BareCapture)) else self.engine).check_reached(
            captured
        )
        if not isinstance(captured, BareCapture):
            self.param_groups[0]["posterior"]["loss_is_mean"] = captured.shows_mean
        finished = FinishedPass(captured, sample, loss_scale, self.stashed_means())
        self._open_update.add(finished, before, self._read_pass(finished))

    def measured(self, add_ranks: Callable[[list[Tensor]], None] | None = None) -> tuple[list[Tensor], float]:
        """The measurement of the open update, for hosts that average it over processes before `step`.

        The call counts as a promise to do so: in distributed training `step` raises an error without it.

        Args:
            add_ranks: Replaces tensors by their sums over the processes that share weight samples with this one, for
                curvatures that are not linear in the gradients. None if no processes share samples.

        Returns:
            The loss, ĝ and, if the update measures it, ĥ of every trained parameter, as tensors to be averaged in place; and
            the number of examples.
        """
        self._open_update.is_averaged_by_host = True
        if add_ranks is not None:
            self._join_ranks(self._open_update.curvature, self._open_update.examples, add_ranks)
        measurement = self._measurement(fill=True)
        return measurement.tensors(), measurement.num_examples

    def _join_ranks(self, curvature: Curvature, num_examples: float, add_ranks: Callable[[list[Tensor]], None]) -> None:
        """Sum over processes the curvatures that are not linear in the passes of one weight sample."""

    def _measurement(self, *, fill: bool) -> Measurement:
        """The measurement of the open update."""
        update = self._open_update
        if update.final_curvature is None:
            update.final_curvature = self._finalise_curvature(update.curvature)
        return update.measurement((param for _, param in self.trained()), update.final_curvature, fill=fill)

    def _require_averaged(self) -> None:
        is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if is_distributed and not self._open_update.is_averaged_by_host:
            raise UnsupportedTrainingError(
                f"{dist.get_world_size()} processes train together, but their measurements have not been averaged, so they "
                "would drift apart. Call lightning_bayes.strategies.all_reduce_mean_(*opt.measured()) before opt.step(), "
                "and run the passes under `with ddp_model.no_sync(), opt.sampled_params(rank):`."
            )

    def stashed_means(self) -> dict[nn.Parameter, Tensor]:
        """The means of the parameters that hold a sample now; empty outside a pass."""
        return self._stashed_means or {}

    @property
    def num_examples(self) -> float:
        """Number of examples in the passes since the last step."""
        return self._open_update.examples

    def discard_passes(self) -> None:
        """Discard the passes of the open update. The next `step` does nothing."""
        self.zero_grad()
        self._open_update.is_discarded = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Outside a pass, also discard the passes of the open update.

        Args:
            set_to_none: As in `torch.optim.Optimizer`.
        """
        super().zero_grad(set_to_none)
        if self._stashed_means is None:
            self._close_update()

    def _close_update(self) -> None:
        self._open_update.clear(self.engine.workspace)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the posterior from the passes since the last step.

        A non-finite measurement is skipped with a warning; `max_nonfinite_steps` of them in a row raise `NonFiniteError`.

        Args:
            closure: Clears the gradients, computes the loss, calls backward and returns the loss, as in `torch.optim`. It
                runs at `mc_samples` weight samples.

        Returns:
            The loss of the closure, averaged over samples; None without a closure.

        Raises:
            NoMeasurementError: If no pass was measured.
        """
        loss = None if closure is None else self._run_closure(closure)
        self._opt_called = True  # checked by LR schedulers
        if self.groups_owner is not None:
            self.groups_owner._opt_called = True  # type: ignore[attr-defined]
        if self._open_update.is_discarded:
            self._close_update()
            return loss
        if not self._open_update.examples:
            advice = "Run forward and backward inside `with opt.sampled_params():` first, or pass a closure."
            if self.closure_opens_passes:
                advice = "In LightningModule.optimizer_step, call optimizer.step(closure=optimizer_closure)."
            raise NoMeasurementError(f"{type(self).__name__}.step() was called without measured gradients. {advice}")
        self._require_averaged()
        measurement = self._measurement(fill=self._fills_gradients)
        is_finite = measurement.is_finite()
        if is_finite:
            self.skipped_in_a_row = 0
            self._update_all(measurement)
        else:
            self._skip_update()
        self._close_update()
        return loss

    mark_as_scheduled(step)

    def _run_closure(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            # In Lightning's manual optimization the closure is empty and comes after the passes.
            if self.closure_opens_passes or self._open_update.examples:
                return closure()
            self.zero_grad()
            losses = []
            for sample in range(self.mc_samples):
                with self.measured_pass(sample, watch_backward=True, is_only_batch=True):
                    losses.append(torch.as_tensor(closure()).detach())
            return torch.stack(losses).mean()

    def require_finite(self) -> None:
        """Require finite weights and state. An update with finite inputs may still overflow.

        This synchronises with the device, so hosts call it where they wait anyway, such as before writing a checkpoint.

        Raises:
            NonFiniteError: If any parameter has non-finite weights or state; the message names them.
        """
        means = self.stashed_means()

        def tensors_of(param: nn.Parameter) -> list[Tensor]:
            state = (value for value in self.state.get(param, {}).values() if isinstance(value, Tensor))
            return [means.get(param, param), *state]

        params = (param for group in self.param_groups for param in group["params"])
        if culprits := nonfinite_params(self.model, params, tensors_of):
            raise NonFiniteError(overflow_message(culprits, self.num_updates, self.param_groups[0]))

    def _skip_update(self) -> None:
        for buffer, value in self._open_update.buffers:
            buffer.copy_(value)
        self.require_finite()
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        text = skip_message(self.model, self.num_updates + 1, self.skipped_in_a_row)
        if self.skipped_in_a_row >= self.max_nonfinite_steps:
            raise NonFiniteError(text + f" Stopped at max_nonfinite_steps={self.max_nonfinite_steps}.")
        warnings.warn(text, stacklevel=3)


def _watch(captured: Capture) -> AbstractContextManager[Any]:
    return nullcontext() if isinstance(captured, BareCapture) else BackwardWatch(captured.observe)
