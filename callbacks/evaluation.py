"""Evaluation under samples: a module's own steps see the average over S of them, such as S weights of a posterior.

Between the start and the end of validation, test and prediction, ``forward`` of the module is replaced by S sampled
forwards, combined so that the result can stand in for the module's own output: for logits the **log of the mean
probability**, so that the user's cross-entropy and accuracy become those of the Monte-Carlo predictive. Forward hooks will
not do: under DDP a step runs through the module's forward.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.predictive import Link, Samples, as_dict, check_link, combine, summarise


class SampledEvaluation:
    """Replaces a module's ``forward`` (and default ``predict_step``) while it is active.

    Args:
        module: The module.
        samples: The samples.
        link: How outputs become predictions.
        way_out: How not to average, for messages.
        lenient: Whether to go on without averaging, with a warning, where outputs have no average. An epoch of training is
            worth more than an error in its validation.
    """

    def __init__(
        self, module: LightningModule, samples: Samples, link: Link, *, way_out: str, lenient: bool = False
    ) -> None:
        check_link(link)  # it may be the module's own attribute
        self.module, self.samples, self.link, self.way_out = module, samples, link, way_out
        self.lenient, self._gave_up = lenient, False
        self.calls = 0
        self._forward: Callable[..., Tensor] = module.forward
        self._replaced: dict[str, Any] = {}  # the instance's own attribute, or None where the class's shows

    def start(self, predict: bool) -> None:
        """Activate.

        Args:
            predict: Whether this is prediction, where Lightning's default ``predict_step`` gives way to one that returns
                probabilities, entropy and mutual information. A ``predict_step`` of the user's own stays.
        """
        self._patch("forward", self._combined)
        if hasattr(self.module, "sampled_forward"):  # a module that wants the samples themselves, as regression does
            self._patch("sampled_forward", self.outputs)
        if hasattr(self.module, "averages"):
            self._patch("averages", True)
        if self.samples.has_mean and hasattr(self.module, "mean_forward"):  # and one that measures the mean, too
            self._patch("mean_forward", self.at_mean)
        if predict and getattr(self.module.predict_step, "__func__", None) is LightningModule.predict_step:
            self._patch("predict_step", types.MethodType(self._predict_step, self.module))

    def _patch(self, name: str, replacement: Any) -> None:
        self._replaced[name] = self.module.__dict__.get(name)
        setattr(self.module, name, replacement)

    def stop(self, warn: bool = True) -> None:
        """Deactivate.

        Args:
            warn: Whether to warn if nothing was averaged.
        """
        for name, own in self._replaced.items():
            self.module.__dict__.pop(name, None)
            if own is not None:
                setattr(self.module, name, own)
        if warn and self._replaced and not self.calls:
            rank_zero_warn(
                f"{type(self.module).__name__}'s steps did not call self(...), so nothing was averaged and the results are "
                f"those of the module as it is. Call self(x) in the steps, or {self.way_out}."
            )
        self._replaced = {}

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's outputs under every sample, ``[S, …]``."""
        self.calls += 1
        with self._own_forward():
            return self.samples.outputs(self.module, lambda: self._one(*args, **kwargs))

    def at_mean(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's own output, ``[…]``: for a posterior the one at its mean."""
        with self._own_forward(), self.samples.at_mean(self.module):
            return self._one(*args, **kwargs)

    @contextmanager
    def _own_forward(self) -> Iterator[None]:
        # What runs in here is the module itself, so inner calls of self(...) must not sample again.
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
                f"tensor (logits or means), or {self.way_out}."
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

    def _predict_step(self, module: LightningModule, batch: Any, *args: Any) -> dict[str, Tensor]:
        inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
        with torch.no_grad():
            outputs = self._of_batch(inputs) / (getattr(module, "temperature", None) or 1.0)
            return as_dict(summarise(outputs, self.link))

    def _of_batch(self, inputs: Any) -> Tensor:
        try:
            return self.outputs(inputs)
        except (TypeError, AttributeError) as error:
            if not isinstance(inputs, Mapping):
                raise
            name = type(self.module).__name__
            raise UnsupportedTrainingError(
                f"{name} has no predict_step of its own, so forward was given the whole batch, a {type(inputs).__name__} "
                f"of {', '.join(map(str, inputs))}, and failed: {error}. Define {name}.predict_step(self, batch, batch_idx) "
                "that returns self(...) of the batch's inputs."
            ) from error
