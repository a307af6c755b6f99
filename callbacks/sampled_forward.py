"""Replaces a module's ``forward`` by its average over samples, such as S weight samples of a posterior.

While active, ``forward`` runs under S samples and combines their outputs into one output of the same kind. Logits become the
**log of the mean probability**, so the user's cross-entropy and accuracy evaluate the Monte-Carlo predictive. Forward hooks
do not work here: under DDP, a step itself runs inside the module's forward.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributions import Distribution

from lightning_bayes.callbacks.forward_arguments import ForwardArguments
from lightning_bayes.callbacks.patches import Patches
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.predictive import (
    Link,
    SampledModule,
    Samples,
    as_dict,
    combine,
    find_link,
    summarise,
)
from lightning_bayes.predictive.observations import Form, Observation, form_of, mixture_output, observed
from lightning_bayes.predictive.quantiles import grouped
from lightning_bayes.predictive.repeated import Repeatable, copied
from lightning_bayes.private_torch import tree_flatten, tree_unflatten


class _NoAverageError(UnsupportedTrainingError):
    """The outputs of samples cannot be averaged."""


@final
class PackedOutputs:
    """Packs nested tuples, lists and dictionaries of tensors ``[batch, …]`` into one ``[batch, columns]``, and back."""

    def __init__(self) -> None:
        self._spec: Any = None
        self._shapes: list[torch.Size] = []  # without the batch; empty for a single tensor

    def pack(self, output: Any) -> Tensor | None:
        """One tensor; None if the output holds anything but tensors with one row per example."""
        if isinstance(output, Tensor):
            self._shapes = []
            return output
        leaves, self._spec = tree_flatten(output)
        rows = {len(leaf) if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves}
        if len(rows) != 1 or None in rows:
            return None
        self._shapes = [leaf.shape[1:] for leaf in leaves]
        return torch.cat([leaf.reshape(len(leaf), -1) for leaf in leaves], 1)

    def unpack(self, packed: Tensor) -> Any:
        """The output of the packed structure, with any number of rows."""
        if not self._shapes:
            return packed
        parts = torch.split(packed, [shape.numel() for shape in self._shapes], 1)
        leaves = [part.reshape(len(part), *shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return tree_unflatten(leaves, self._spec)


@final
class SampledForward:
    """Replaces a module's ``forward`` (and default ``predict_step``) while it is active."""

    def __init__(
        self,
        module: LightningModule,
        samples: Samples,
        link: Link,
        *,
        temperature: float = 1.0,
        opt_out_hint: str,
        lenient: bool = False,
        observation: Observation | None = None,
        interval: float = 0.9,
    ) -> None:
        self.module, self.samples, self.opt_out_hint = module, samples, opt_out_hint
        self.link = find_link(link)  # it may be the module's own attribute
        self.observation, self.interval, self._packing = observation, interval, PackedOutputs()
        self.temperature, self.lenient, self._gave_up = temperature, lenient, False
        self.calls = 0
        self._dtype = torch.float32  # of the module's outputs
        self.last: Tensor | None = None  # outputs of the last call, [S, …]
        self._has_warned = self._has_form = False
        self._form: Form | None = None  # of outputs with mean and variance
        self._forward: Callable[..., Tensor] = module.forward
        self._last_call = Repeatable(self._forward)
        self._arguments = ForwardArguments(module)
        self._patches = Patches()

    def start(self, predict: bool) -> None:
        """Replace the module's methods."""
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
            patch(module, "predict_step", self._with_uncertainty(module.predict_step))

    def stop(self, warn: bool = True) -> None:
        """Restore the module's methods, and warn by default if nothing was averaged."""
        self._patches.undo()
        if warn and not self.calls:
            rank_zero_warn(
                f"{type(self.module).__name__}'s steps did not call self(...), so nothing was averaged: the results use the "
                f"module's current weights. Call self(x) in the steps, or {self.opt_out_hint}."
            )

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's outputs under every sample, ``[S, …]``."""
        self.calls += 1
        self._last_call = Repeatable(self._forward, *args, **kwargs)
        with self._original_forward():
            outputs = self.samples.outputs(self.module, partial(self._single_output, self._last_call))
        self._dtype = outputs.dtype  # averages and entropies of half precision would be rounded
        self.last = outputs.to(torch.promote_types(outputs.dtype, torch.float32)) / self.temperature
        return self.last

    def at_mean(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's output without sampling, ``[…]``: for a posterior, at its mean and at the same temperature."""
        is_last = self._last_call.takes(args, kwargs)
        return self._at_mean(self._last_call if is_last else Repeatable(self._forward, *args, **kwargs))

    def last_at_mean(self) -> Tensor:
        """The output of the last call without sampling, ``[…]``."""
        output = self._at_mean(self._last_call)
        return output.to(torch.promote_types(output.dtype, torch.float32))

    def _at_mean(self, call: Repeatable) -> Tensor:
        with self._original_forward(), self.samples.at_mean(self.module):
            output = self._single_output(call)
        return output if self.temperature == 1 else output / self.temperature

    @contextmanager
    def _original_forward(self) -> Iterator[None]:
        # Inner calls of self(...) must not sample again.
        self.module.forward = self._forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.module.forward = self._combined  # type: ignore[method-assign]

    def _single_output(self, call: Repeatable) -> Tensor:
        output = call()
        packed = output if self.observation is None else self._packing.pack(output)
        if not isinstance(packed, Tensor):
            raise _NoAverageError(
                f"{type(self.module).__name__}.forward returned a {type(output).__name__}, which cannot be averaged. Return "
                f"one tensor (logits or means), or {self.opt_out_hint}."
            )
        return packed

    def _combined(self, *args: Any, **kwargs: Any) -> Any:
        if self._gave_up:
            return self._forward(*args, **kwargs)
        try:
            return self._packing.unpack(self._average(self.outputs(*args, **kwargs)).to(self._dtype))
        except UnsupportedTrainingError as error:
            if not self.lenient and not isinstance(error, _NoAverageError):
                raise
            self._give_up(error)
            return self._last_call()

    def _average(self, outputs: Tensor) -> Tensor:
        """One output for all samples: of the mixture, if its form is known."""
        if not self._has_form:
            self._form, self._has_form = self._found_form(outputs), True
        return combine(outputs, self.link) if self._form is None else mixture_output(outputs, self._form)

    def _found_form(self, outputs: Tensor) -> Form | None:
        """How outputs state mean and variance; a line tells if they do so in a form that cannot be averaged."""
        found = self.distribution()
        if found is None:
            return None
        mean, variance = (grouped(value, found[1]) for value in (found[0].mean, found[0].variance))
        form = form_of(outputs, mean, variance)
        is_told = form is not None or self.lenient  # a fit validates many times
        if not is_told and not self._is_plain(combine(outputs, self.link), mean.mean(0), variance.mean(0)):
            rank_zero_info(
                f"{type(self.module).__name__}'s steps get the raw outputs averaged over samples, from which the "
                "distribution of the targets does not follow: trainer.predict and the logged test/reg/... hold it. Let "
                "forward return the mean and the variance (or its logarithm, or the standard deviation) to get those of "
                "the mixture from self(...)."
            )
        return form

    def _is_plain(self, average: Tensor, mean: Tensor, variance: Tensor) -> bool:
        """Whether the averaged output states the mean of the mixture, and the mean variance."""
        assert self.observation is not None
        distribution = self.observation(self._packing.unpack(average))
        pairs = ((distribution.mean, mean), (distribution.variance, variance))
        return all(torch.allclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True) for one, other in pairs)

    def _give_up(self, error: Exception) -> None:
        """Go on with the module's current weights, as plain Lightning, because one batch cannot be averaged."""
        rank_zero_warn(f"{error} The evaluation continues without averaging.")
        self._gave_up = True

    def _predict_step(self, module: LightningModule, batch: Any, *args: Any) -> Any:
        with torch.no_grad():
            if not self._arguments.is_known:
                self._arguments.call(self._forward, copied(batch))  # a call that fails must not use up samples
            if not self._gave_up:
                try:
                    return self._summary(self._arguments.call(self.outputs, batch))
                except _NoAverageError as error:
                    self._give_up(error)
                    return self._last_call()
            return self._arguments.call(self._forward, batch)

    def _with_uncertainty(self, predict_step: Callable[..., Any]) -> Callable[..., Any]:
        """Add the uncertainty of the step's single call of ``self(...)`` to the dictionary that it returns."""

        @functools.wraps(predict_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            calls_before = self.calls
            result = predict_step(*args, **kwargs)
            calls = self.calls - calls_before
            if isinstance(result, dict) and calls == 1 and self.last is not None:
                summary = self._summary(self.last)
                uncertainty = {name: value for name, value in summary.items() if name not in {"probs", "mean"}}
                return {**uncertainty, **result}
            self._warn_without_uncertainty(result, calls)
            return result

        return step

    def distribution(self) -> tuple[Distribution, int] | None:
        """The targets' distribution under each sample of the last call, ``[S · B, …]``, and S; None if unknown."""
        if self.observation is None or self.last is None:
            return None
        return self.observation(self._packing.unpack(self.last.flatten(0, 1))), len(self.last)

    def distribution_at_mean(self) -> Distribution | None:
        """The targets' distribution for the last call without sampling, ``[B, …]``; None if unknown."""
        return None if self.observation is None else self.observation(self._packing.unpack(self.last_at_mean()))

    def mean_output(self) -> Any:
        """The raw outputs of the last call, averaged over samples."""
        return None if self.last is None else self._packing.unpack(self.last.mean(0))

    def _summary(self, outputs: Tensor) -> dict[str, Tensor]:
        distribution = self.distribution()
        if distribution is not None:
            return observed(*distribution, self.interval)._asdict()
        return as_dict(summarise(outputs, self.link))

    def _warn_without_uncertainty(self, result: Any, calls: int) -> None:
        if self._has_warned or not calls:
            return
        self._has_warned = True
        name = type(self.module).__name__
        reason = f"returns a {type(result).__name__}" if calls == 1 else f"calls self(...) {calls} times"
        rank_zero_warn(
            f"{name}.predict_step {reason}, so its predictions carry no entropy and mutual information. Call self(...) once "
            f"and return a dict to get them, or delete {name}.predict_step to get probabilities as well."
        )
