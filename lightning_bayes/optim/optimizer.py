"""Base class of all noisy optimizers: passes at sampled weights, and a step that is skipped if anything is not finite.

A pass replaces the weights by a sample, runs forward and backward under the engine, and restores the mean bit for bit. A
step averages the passes and updates the posterior. Outside a pass the parameters **are** the posterior mean.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import AbstractEngine, Capture
from lightning_bayes.errors import NonFiniteError, UnsupportedTrainingError
from lightning_bayes.optim.diagonal.estimators import CurvatureEstimator
from lightning_bayes.optim.finished_pass import BarePass, Curvature, FinishedPass, UpdateMeasurement
from lightning_bayes.optim.finiteness import require_finite, skip_message
from lightning_bayes.optim.groups import FORMAT, KEY, split
from lightning_bayes.optim.loss_notes import NOTES, LossNotes
from lightning_bayes.optim.noise import CounterNoise, counter_seed
from lightning_bayes.optim.passes import OpenUpdate, at_sample, for_plain_mean_, open_pass
from lightning_bayes.private_torch import mark_as_scheduled


class NoisyOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer over a weight posterior. Subclasses say how weights are sampled, measured and updated.

    Class attributes:
        estimator: Estimates the curvature ĥ from passes.
        joins_weights: Whether the posterior correlates all weights. There is then one parameter group, which is fixed.
        fills_gradients: Whether a step moves parameters without a gradient too, and takes that of a mean loss: not torch's.

    Args:
        model: The model to train.
        engine: Measures the curvature of passes.
        params: Parameters or parameter groups; or another optimizer, whose list of groups is then shared.
        defaults: Settings of the groups, including ``noise_seed`` and ``step``; see `optim.groups`.
        mc_samples: K, weight samples per batch, whose gradients are averaged.
        max_nonfinite_steps: Number of consecutive non-finite updates after which `step` raises `NonFiniteError`.
    """

    estimator: CurvatureEstimator
    joins_weights: ClassVar[bool] = False
    fills_gradients: bool = True
    # Draws a posterior sample of the parameters to perturb, in separate memory with the same strides.
    draw_sample: Callable[[CounterNoise], dict[nn.Parameter, Tensor]]

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
        self.model, self.engine, self.mc_samples = model, engine, mc_samples
        self.max_nonfinite_steps, self.skipped_steps, self.skipped_in_a_row = max_nonfinite_steps, 0, 0
        self._open_update, self.notes, (defaults, self.posterior_defaults) = OpenUpdate(), LossNotes(), split(defaults)
        self.groups_owner = params if isinstance(params, torch.optim.Optimizer) else None
        self._holder: Any = SimpleNamespace(param_groups=[])  # torch's constructor fills its groups
        shared = None if self.groups_owner is None else (self.groups_owner.param_groups, self.groups_owner.defaults)
        super().__init__(*(shared or (params, defaults)))
        self._holder = self.groups_owner or self._holder

    @abstractmethod
    def capture_pass(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture | BarePass]:
        """The capture of one pass, to be entered around forward and backward."""

    @abstractmethod
    def read_pass(self, finished: FinishedPass) -> Curvature:
        """Read ĥ of a pass, for the mean loss. Passes are averaged key by key."""

    @abstractmethod
    def _update_all(self, measurement: UpdateMeasurement) -> None:
        """Update all parameters and count the update."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups: one list, shared with the optimizer that was passed as `params` or `base`."""
        return self._holder.param_groups  # type: ignore[no-any-return]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._holder.param_groups = groups

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
        if self.groups_owner is not None and self._holder is self.groups_owner:
            self.groups_owner.add_param_group(param_group)
        else:
            super().add_param_group(param_group)
        self.param_groups[-1][KEY] = settings

    def start_groups(self) -> None:
        """Give settings and state to groups and parameters that others have added to the list of groups."""

    def state_dict(self) -> dict[str, Any]:
        """The state, with copies of the groups' settings; see `torch.optim.Optimizer`."""
        state = {**super().state_dict(), "format": FORMAT, NOTES: dict(vars(self.notes))}
        return {**state, "param_groups": [{**group, KEY: dict(group[KEY])} for group in state["param_groups"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; see `torch.optim.Optimizer`."""
        super().load_state_dict(self.notes.load(state_dict))

    def __getstate__(self) -> dict[str, Any]:
        """All attributes but the family's, which refers to its optimizer weakly. torch's keeps state and groups alone."""
        return {name: value for name, value in vars(self).items() if name not in {"family", "draw_sample"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore attributes; groups without their holder, as in a checkpoint, go to the list in use."""
        groups = state.pop("param_groups", None)
        super().__setstate__(state)
        if groups is not None:
            self.param_groups = groups

    @property
    def num_updates(self) -> int:
        """Number of updates so far, the counter of the noise."""
        return max(int(group[KEY]["step"]) for group in self.param_groups)

    def trained(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        """The parameters that are trainable now, with their groups."""
        return ((group, p) for group in self.param_groups for p in group["params"] if p.requires_grad)

    def sampled_params(self, sample: int | None = None, *, loss_scale: float = 1.0) -> AbstractContextManager[None]:
        """Open a pass: inside the context the weights are a posterior sample, and backward is measured.

        Run forward and backward inside. Gradients of passes add up as in plain PyTorch; with ``mc_samples=K``, those of K
        passes over one batch are averaged. Under ``torch.no_grad()`` the context only samples.

        Args:
            sample: Index of the noise; equal indices give equal noise until the next `step`. Default: 0, 1, ... in turn.
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
        share: float | None = None,
    ) -> Iterator[Any]:
        """Like `sampled_params`, for hosts that pass the loss to the capture and state the gradient's share."""
        update = self._open_update
        if update.means is not None:
            raise UnsupportedTrainingError("sampled_params() is open already; passes cannot be nested.")
        index = update.num_opened if sample is None else sample
        update.num_opened, update.is_only_batch, update.share = update.num_opened + 1, is_only_batch, share
        update.keeps_sums, update.always_measures = not self.fills_gradients, update.always_measures | always_measures
        self.start_groups()
        if torch.is_grad_enabled():
            with open_pass(self, update, index, loss_scale=loss_scale, watch_backward=watch_backward) as captured:
                yield captured
        else:
            with at_sample(self, update, index):
                yield None

    def label_seed(self, sample: int) -> int:
        """Seed for the labels that a pass samples, given the index of its weight sample."""
        seed = int(self.param_groups[0][KEY]["noise_seed"])
        return counter_seed(seed, self.num_updates, sample, self._open_update.num_opened)

    def stashed_means(self) -> dict[nn.Parameter, Tensor]:
        """The means of the parameters that hold a sample now; empty outside a pass."""
        return self._open_update.means or {}

    def collect(self, add_ranks: Callable[[list[Tensor]], None] | None = None) -> tuple[list[Tensor], float]:
        """Finish the measurement of the update, for hosts that average it over processes; `step` requires it of several.

        Args:
            add_ranks: Sums tensors over processes that share weight samples, if any do; not all curvatures are linear.

        Returns:
            Tensors to average in place (loss, g, ĥ, moved means, examples of a summed loss), and the number of examples.
        """
        (update := self._open_update).is_averaged_by_host = True
        if add_ranks is not None:
            self.estimator.join_ranks(update.curvature, update.examples, add_ranks)
        measurement, summed = self._measurement(fill=True), list[Tensor]()
        if update.has_sums:  # processes count different examples, and need one prior
            summed = [measurement.loss.new_tensor(measurement.summed)]
            (update.summed,) = summed
            if update.keeps_sums:
                for_plain_mean_(summed[0], measurement.grads.values())
        return [*measurement.tensors(), *update.moved.values(), *summed], measurement.num_examples

    def _measurement(self, *, fill: bool) -> UpdateMeasurement:
        """The measurement of the open update; with `fill`, parameters without ``.grad`` get zeros instead of staying out."""
        update, params = self._open_update, [param for _, param in self.trained()]
        if update.final_curvature is None:
            update.final_curvature = {}
            if update.to_measure != {}:
                update.final_curvature = update.finalised(self.estimator, self.param_groups, self.mc_samples)
        for param in params if fill else ():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        grads = {param: param.grad for param in params if param.grad is not None}
        if update.loss is None:  # kept, because a host averages it in place
            update.loss = torch.zeros((), device=params[0].device)
        counts = update.examples, len(update.samples), update.is_counted, float(update.summed)
        return UpdateMeasurement(update.loss, grads, update.final_curvature, *counts)

    def discard_passes(self, *, if_empty: bool = False) -> None:
        """Discard the passes of the open update, or only an update without any. The next `step` does nothing."""
        if if_empty and self._open_update.examples:
            return
        self.zero_grad()
        self._open_update.is_discarded = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as in `torch.optim.Optimizer`; outside a pass, discard the passes of the open update too."""
        super().zero_grad(set_to_none)
        if self._open_update.means is None:
            self._open_update.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, closure_opens_passes: bool = False) -> Any:
        """Update the posterior from the passes since the last step.

        A non-finite measurement is skipped with a warning; `max_nonfinite_steps` of them in a row raise `NonFiniteError`.

        Args:
            closure: As in `torch.optim`: clears the gradients, calls backward, returns the loss. Runs at K weight samples.
            closure_opens_passes: Whether `closure` samples the weights itself, as the callbacks' does, and runs once.

        Returns:
            The loss of the closure, averaged over samples; None without a closure.
        """
        loss, update = None, self._open_update
        if closure is not None:
            with torch.enable_grad():  # in Lightning's manual optimization an empty closure comes after the passes
                loss = closure() if closure_opens_passes or update.examples else self._run_closure(closure)
        self._opt_called = True  # checked by LR schedulers
        if self.groups_owner is not None:
            self.groups_owner._opt_called = True  # type: ignore[attr-defined]
        if not update.is_discarded:
            update.require_passes(type(self).__name__, is_hosted=closure_opens_passes)
            measurement = self._measurement(fill=self.fills_gradients)
            if measurement.is_finite():
                self.skipped_in_a_row = 0
                self._update_all(measurement)
            else:
                self._skip_update()
        update.clear()
        return loss

    mark_as_scheduled(step)

    def _run_closure(self, closure: Callable[[], Any]) -> Tensor:
        """Run the closure at `mc_samples` weight samples, and return the mean loss."""
        self.zero_grad()
        losses = []
        for sample in range(self.mc_samples):
            with self.measured_pass(sample, watch_backward=True, is_only_batch=True):
                losses.append(torch.as_tensor(closure()).detach())
        return torch.stack(losses).mean()

    def _skip_update(self) -> None:
        """Undo what the passes did to buffers, and warn; raise `NonFiniteError` after too many skipped updates."""
        for buffer, value in self._open_update.buffers:
            buffer.copy_(value)
        self.require_finite()
        self.skipped_steps, self.skipped_in_a_row = self.skipped_steps + 1, self.skipped_in_a_row + 1
        text = skip_message(self.model, self.num_updates + 1, self.skipped_in_a_row)
        if self.skipped_in_a_row >= self.max_nonfinite_steps:
            raise NonFiniteError(text + f" Stopped at max_nonfinite_steps={self.max_nonfinite_steps}.")
        warnings.warn(text, stacklevel=3)

    def require_finite(self) -> None:
        """Raise `NonFiniteError` if weights or state are not finite, as after an overflow; synchronises with the device."""
        require_finite(self.model, self.param_groups, self.state, self.stashed_means())
