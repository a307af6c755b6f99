"""A module's ``forward`` as the average over samples, such as S weights of a posterior.

While it is active, ``forward`` of the module runs under S samples and combines the outputs so that the result can stand in
for the module's own: for logits the **log of the mean probability**, so that the user's cross-entropy and accuracy become
those of the Monte-Carlo predictive. Forward hooks would not do: under DDP a step runs through the module's forward.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_bayes.callbacks.patches import Patches
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.predictive import Link, SampledModule, Samples, as_dict, check_link, combine, summarise


@final
class SampledForward:
    """Replaces a module's ``forward`` (and default ``predict_step``) while it is active.

    Args:
        module: The module.
        samples: The samples.
        link: How outputs become predictions.
        opt_out_hint: How to evaluate without samples, for messages.
        lenient: Whether to go on without averaging, with a warning, where outputs have no average. An epoch of training is
            worth more than an error in its validation.
    """

    def __init__(
        self, module: LightningModule, samples: Samples, link: Link, *, opt_out_hint: str, lenient: bool = False
    ) -> None:
        check_link(link)  # it may be the module's own attribute
        self.module, self.samples, self.link, self.opt_out_hint = module, samples, link, opt_out_hint
        self.lenient, self._gave_up = lenient, False
        self.calls = 0
        self._last: Tensor | None = None  # what the last call gave, [S, …]
        self._has_warned = False
        self._forward: Callable[..., Tensor] = module.forward
        self._patches = Patches()

    def start(self, predict: bool) -> None:
        """Activate.

        Args:
            predict: Whether this is prediction, where Lightning's default ``predict_step`` is replaced by one that returns
                probabilities, entropy and mutual information. A ``predict_step`` of the user's own stays; a dictionary from
                it gets the latter two.
        """
        patch, module = self._patches.set, self.module
        patch(module, "forward", self._combined)
        if isinstance(module, SampledModule):
            patch(module, "sampled_forward", self.outputs)
            patch(module, "averages", True)
            if self.samples.has_mean:
                patch(module, "mean_forward", self.at_mean)
        if predict and getattr(module.predict_step, "__func__", None) is LightningModule.predict_step:
            patch(module, "predict_step", types.MethodType(self._predict_step, module))
        elif predict:
            patch(module, "predict_step", self._beside(module.predict_step))

    def stop(self, warn: bool = True) -> None:
        """Deactivate.

        Args:
            warn: Whether to warn if nothing was averaged.
        """
        self._patches.undo()
        if warn and not self.calls:
            rank_zero_warn(
                f"{type(self.module).__name__}'s steps did not call self(...), so nothing was averaged and the results are "
                f"those of the module as it is. Call self(x) in the steps, or {self.opt_out_hint}."
            )

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's outputs under every sample, ``[S, …]``."""
        self.calls += 1
        with self._own_forward():
            self._last = self.samples.outputs(self.module, lambda: self._one(*args, **kwargs))
        return self._last

    def at_mean(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's own output, ``[…]``: for a posterior the one at its mean."""
        with self._own_forward(), self.samples.at_mean(self.module):
            return self._one(*args, **kwargs)

    @contextmanager
    def _own_forward(self) -> Iterator[None]:
        # In here runs the module itself: inner calls of self(...) must not sample again.
        self.module.forward = self._forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.module.forward = self._combined  # type: ignore[method-assign]

    def _one(self, *args: Any, **kwargs: Any) -> Tensor:
        output = self._forward(*args, **kwargs)
        if not isinstance(output, Tensor):
            raise UnsupportedTrainingError(
                f"{type(self.module).__name__}.forward returned a {type(output).__name__}, which has no average. Return one "
                f"tensor (logits or means), or {self.opt_out_hint}."
            )
        return output

    def _combined(self, *args: Any, **kwargs: Any) -> Any:
        if self._gave_up:
            return self._forward(*args, **kwargs)
        try:
            return combine(self.outputs(*args, **kwargs), self.link)
        except UnsupportedTrainingError as error:
            if not self.lenient:
                raise
            rank_zero_warn(f"{error} Validation during the fit goes on without averaging.")
            self._gave_up = True
            return self._forward(*args, **kwargs)

    def _arguments(self, batch: Mapping[Any, Any]) -> dict[str, Any]:
        """The entries of a dictionary that are arguments of ``forward``; none if one that it requires is missing."""
        parameters = inspect.signature(self._forward).parameters.values()
        named = [each for each in parameters if each.kind in {each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY}]
        if any(each.default is each.empty and each.name not in batch for each in named):
            return {}
        return {each.name: batch[each.name] for each in named if each.name in batch}

    def _predict_step(self, module: LightningModule, batch: Any, *args: Any) -> dict[str, Tensor]:
        inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
        with torch.no_grad():
            return self._summary(self._of_batch(inputs))

    def _beside(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """A ``predict_step`` of the user's own, whose dictionary gets the uncertainty of its one call of ``self(...)``."""

        @functools.wraps(own)
        def step(*args: Any, **kwargs: Any) -> Any:
            before = self.calls
            result = own(*args, **kwargs)
            is_clear = self.calls == before + 1 and self._last is not None
            if isinstance(result, dict) and is_clear:
                return {**self._uncertainty(), **result}
            self._warn_without_uncertainty(result, self.calls - before)
            return result

        return step

    def _uncertainty(self) -> dict[str, Tensor]:
        assert self._last is not None
        return {name: value for name, value in self._summary(self._last).items() if name not in {"probs", "mean"}}

    def _summary(self, outputs: Tensor) -> dict[str, Tensor]:
        return as_dict(summarise(outputs / (getattr(self.module, "temperature", None) or 1.0), self.link))

    def _warn_without_uncertainty(self, result: Any, calls: int) -> None:
        if self._has_warned or not calls:
            return
        self._has_warned = True
        name = type(self.module).__name__
        why = f"returns a {type(result).__name__}" if calls == 1 else f"calls self(...) {calls} times"
        rank_zero_warn(
            f"{name}.predict_step {why}, so its predictions carry no entropy and mutual information. Return a dict from one "
            f"call of self(...), and they join it; or delete {name}.predict_step to get probabilities and both."
        )

    def _of_batch(self, inputs: Any) -> Tensor:
        named = self._arguments(inputs) if isinstance(inputs, Mapping) else {}
        try:
            return self.outputs(**named) if named else self.outputs(inputs)
        except (TypeError, AttributeError) as error:
            if not isinstance(inputs, Mapping):
                raise
            name = type(self.module).__name__
            raise UnsupportedTrainingError(
                f"{name} has no predict_step of its own, so forward was given the whole batch, a {type(inputs).__name__} "
                f"of {', '.join(map(str, inputs))}, and failed: {error}. Define {name}.predict_step(self, batch, batch_idx) "
                "that returns self(...) of the batch's inputs."
            ) from error
