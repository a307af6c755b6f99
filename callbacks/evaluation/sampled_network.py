"""A module's own ``forward`` under samples, such as S weight samples of a posterior, and at their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_bayes.likelihood import leaf_at, with_leaf
from lightning_bayes.likelihood.paths import leaves, mapped
from lightning_bayes.predictive import Samples
from lightning_bayes.predictive.averages import OutputAverage
from lightning_bayes.predictive.nested import Differing, of_sample
from lightning_bayes.predictive.repeated import Repeatable


class SampledCall(NamedTuple):
    """One call of ``forward`` and its outputs under each sample, ``[S, …]``."""

    call: Repeatable
    raw: Any
    outputs: Any  # at the temperature, in at least single precision


@final
class SampledNetwork:
    """Runs calls of a module's own ``forward``; calls of ``self(...)`` inside them do not sample again.

    Args:
        module: The module.
        samples: What it runs under.
        average: How the outputs are combined.
        is_quiet: Whether nothing is said of outputs that have no average, as in a fit, which validates many times.
    """

    def __init__(self, module: LightningModule, samples: Samples, average: OutputAverage, is_quiet: bool) -> None:
        self.module, self.samples, self.average = module, samples, average
        self.own: Callable[..., Any] = module.forward
        self._depth = 0  # of calls of the module's own forward that are running
        self._told = {"missing": is_quiet, "less": is_quiet}

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

    def run(self, call: Repeatable) -> SampledCall:
        """Run a call under every sample."""
        with self.replaced_by(self.own):
            raw = self.samples.outputs(self.module, call)
        return SampledCall(call, raw, self.average.tempered(raw))

    def at_mean(self, call: Repeatable) -> Any:
        """The output ``[…]`` without sampling: for a posterior, at its mean and at the same temperature."""
        with self.replaced_by(self.own), self.samples.at_mean(self.module):
            output = call()
        tempered = of_sample(self.average.tempered(mapped(_as_one_sample, output)), 0)
        return mapped(_in_dtype, tempered, output)

    def combined(self, call: SampledCall) -> Any:
        """The average of a call, in the structure and the precision of one output."""
        average = self.average.combined(call.outputs)
        if not self._told["less"]:
            self._tell_less(call.outputs, average)
        return mapped(_in_dtype, self._filled(average, call), of_sample(call.raw, 0))

    def of_sample(self, raw: Any, outputs: Any, index: int) -> Any:
        """The output of one sample, in its own precision."""
        return mapped(_in_dtype, of_sample(outputs, index), of_sample(raw, index))

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
        self._tell_missing(missing)
        mean = self.at_mean(call.call) if self.samples.has_mean else of_sample(call.raw, 0)
        for path in missing:
            result = with_leaf(result, path, leaf_at(mean, path))
        return result

    def _tell_missing(self, paths: list[Any]) -> None:
        """Name the leaves that have no average, once."""
        if not self._told["missing"]:
            names = ", ".join(".".join(map(str, path)) or "the output" for path in paths)
            rank_zero_info(
                f"{type(self.module).__name__}.forward returns values that have no average over samples ({names}): they are "
                f"those of {'the mean network' if self.samples.has_mean else 'the first sample'}."
            )
        self._told["missing"] = True

    def _tell_less(self, outputs: Any, average: Any) -> None:
        """Say once if the distribution of the targets does not follow from the average."""
        self._told["less"] = True
        if self.average.states_less(outputs, average):
            rank_zero_info(
                f"{type(self.module).__name__}'s steps get the raw outputs averaged over samples, from which the "
                "distribution of the targets does not follow: trainer.predict and the logged test/reg/... hold it. Let "
                "forward return the mean and the variance (or its logarithm, or the standard deviation) to get those of "
                "the mixture from self(...)."
            )


def _as_one_sample(leaf: Any) -> Any:
    return leaf[None] if isinstance(leaf, Tensor) else Differing([leaf])


def _in_dtype(leaf: Any, like: Any) -> Any:
    """A real value in the precision of another."""
    both_real = all(isinstance(value, Tensor) and value.is_floating_point() for value in (leaf, like))
    return leaf.to(like.dtype) if both_real else leaf
