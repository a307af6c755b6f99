"""Replaces a module's ``forward`` by its average over samples, such as S weight samples of a posterior.

While active, ``forward`` runs under S samples and combines their outputs into one of the same structure. Logits become the
**log of the mean probability**, so the user's cross-entropy and accuracy evaluate the Monte-Carlo predictive. Forward hooks
do not work here: under DDP, a step itself runs inside the module's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_bayes.callbacks.trainer.patches import Patches
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.likelihood import leaf_at, with_leaf
from lightning_bayes.likelihood.paths import leaves, mapped
from lightning_bayes.predictive import SampledModule, Samples
from lightning_bayes.predictive.averages import OutputAverage
from lightning_bayes.predictive.nested import Differing, of_sample
from lightning_bayes.predictive.repeated import Repeatable
from lightning_bayes.private_torch import is_in_functorch


@final
class SampledCall:
    """One call of ``forward`` and its outputs under each sample, ``[S, …]``."""

    def __init__(self, call: Repeatable, raw: Any, outputs: Any) -> None:
        self.call, self.raw, self.outputs = call, raw, outputs  # `outputs` have the temperature, in single precision


@final
class SampledForward:
    """Replaces a module's ``forward`` while it is active.

    Attributes:
        calls: Of ``forward``, in the current step: the last one, or all.
        count: How many there were; those under a transform of `torch.func` are not among `calls`.
        keeps_all: Whether `calls` are all.
        was_called: Whether any step has called ``forward``.
    """

    def __init__(
        self, module: LightningModule, samples: Samples, average: OutputAverage, hint: str, lenient: bool = False
    ) -> None:
        self.module, self.samples, self.average, self.hint, self.lenient = module, samples, average, hint, lenient
        self.calls: list[SampledCall] = []
        self.count, self.keeps_all = 0, False
        self.was_called = self._gave_up = self._has_told = self._has_told_less = False
        self.own: Callable[..., Any] = module.forward
        self._depth = 0  # of calls of the module's own forward that are running
        self.patches = Patches()

    def start(self) -> None:
        """Replace the module's methods."""
        patch, module = self.patches.set, self.module
        patch(module, "forward", self._combined)
        if isinstance(module, SampledModule):
            patch(module, "sampled_forward", self.outputs)
            patch(module, "averages", True)
            if self.samples.has_mean:
                patch(module, "mean_forward", self.at_mean)

    def stop(self, warn: bool = True) -> None:
        """Restore the module's methods, and warn by default if nothing was averaged."""
        self.patches.undo()
        if warn and not self.was_called:
            rank_zero_warn(
                f"{type(self.module).__name__}'s steps did not call self(...), so nothing was averaged: the results use the "
                f"module's current weights. Call self(x) in the steps, or {self.hint}."
            )

    def finish_step(self) -> SampledCall | None:
        """The only call of ``forward`` since the last step; None after none or several."""
        call = self.calls[-1] if self.count == 1 and self.calls else None
        self.calls, self.count = [], 0
        return call

    def outputs(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs under every sample, ``[S, …]``."""
        return self.run(Repeatable(self.own, *args, **kwargs)).outputs

    def run(self, call: Repeatable) -> SampledCall:
        """Call ``forward`` under every sample."""
        self.was_called = True
        with self.replaced_by(self.own):  # inner calls of self(...) must not sample again
            raw = self.samples.outputs(self.module, call)
        sampled = SampledCall(call, raw, self.average.tempered(raw))
        kept = [] if is_in_functorch() else [sampled]  # whose tensors mean nothing outside of a transform
        self.calls = [*self.calls, *kept] if self.keeps_all else kept
        self.count += 1
        return sampled

    def at_mean(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output without sampling, ``[…]``: for a posterior, at its mean and at the same temperature."""
        repeated = next((each.call for each in self.calls if each.call.takes(args, kwargs)), None)
        return self.mean_output(repeated or Repeatable(self.own, *args, **kwargs))

    def mean_output(self, call: Repeatable) -> Any:
        """The output of a call at the mean, at the same temperature."""
        with self.replaced_by(self.own), self.samples.at_mean(self.module):
            output = call()
        tempered = of_sample(self.average.tempered(mapped(_as_one_sample, output)), 0)
        return mapped(in_dtype, tempered, output)

    def combined(self, call: SampledCall) -> Any:
        """The average of a call, in the structure and the precision of one output."""
        average = self.average.combined(call.outputs)
        if not self._has_told_less and not self.lenient:  # a fit validates many times
            self._has_told_less = True
            self._tell_less(call.outputs, average)
        return mapped(in_dtype, self._filled(average, call), of_sample(call.raw, 0))

    def of_sample(self, raw: Any, outputs: Any, index: int) -> Any:
        """The output of one sample, in its own precision."""
        return mapped(in_dtype, of_sample(outputs, index), of_sample(raw, index))

    def summary(self, call: SampledCall) -> Any:
        """The prediction of a call: probabilities, or means and variances, in the structure of the output."""
        return self._filled(self.average.summarised(call.outputs), call)

    def columns(self, call: SampledCall) -> dict[str, Tensor]:
        """The summary of a call whose output is one prediction; empty for several."""
        is_one = isinstance(call.outputs, Tensor) or self.average.only(call.outputs) is not None
        return self.average.summarised(call.outputs) if is_one else {}

    def _filled(self, result: Any, call: SampledCall) -> Any:
        """A result of a call with the values at the mean where there is no average."""
        missing = [path for path, leaf in leaves(result) if isinstance(leaf, Differing)]
        if not missing:
            return result
        self._tell(missing)
        mean = self.mean_output(call.call) if self.samples.has_mean else of_sample(call.raw, 0)
        for path in missing:
            result = with_leaf(result, path, leaf_at(mean, path))
        return result

    @property
    def is_running(self) -> bool:
        """Whether a call of ``forward`` is running."""
        return self._depth > 0

    @contextmanager
    def replaced_by(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Context in which ``forward`` is another function."""
        before = self.module.forward
        self.module.forward = forward  # type: ignore[method-assign]
        self._depth += forward == self.own
        try:
            yield
        finally:
            self._depth -= forward == self.own
            self.module.forward = before  # type: ignore[method-assign]

    def _combined(self, *args: Any, **kwargs: Any) -> Any:
        if self._gave_up:
            return self.own(*args, **kwargs)
        call = Repeatable(self.own, *args, **kwargs)
        try:
            return self.combined(self.run(call))
        except UnsupportedTrainingError as error:
            if not self.lenient:
                raise
            rank_zero_warn(f"{error} The evaluation continues without averaging.")
            self._gave_up = True
            with self.replaced_by(self.own):
                return call()

    def _tell(self, paths: list[Any]) -> None:
        """Name the leaves that have no average, once."""
        if not self._has_told and not self.lenient:
            names = ", ".join(".".join(map(str, path)) or "the output" for path in paths)
            rank_zero_info(
                f"{type(self.module).__name__}.forward returns values that have no average over samples ({names}): they are "
                f"those of {'the mean network' if self.samples.has_mean else 'the first sample'}."
            )
        self._has_told = True

    def _tell_less(self, outputs: Any, average: Any) -> None:
        """Say if the distribution of the targets does not follow from the average."""
        if self.average.states_less(outputs, average):
            rank_zero_info(
                f"{type(self.module).__name__}'s steps get the raw outputs averaged over samples, from which the "
                "distribution of the targets does not follow: trainer.predict and the logged test/reg/... hold it. Let "
                "forward return the mean and the variance (or its logarithm, or the standard deviation) to get those of "
                "the mixture from self(...)."
            )


def _as_one_sample(leaf: Any) -> Any:
    return leaf[None] if isinstance(leaf, Tensor) else Differing([leaf])


def in_dtype(leaf: Any, like: Any) -> Any:
    """A real value in the precision of another."""
    both_real = all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in (leaf, like))
    return leaf.to(like.dtype) if both_real else leaf
