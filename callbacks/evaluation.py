"""Evaluation under the posterior: a module's own steps see the average over S weight samples.

Between the start and the end of validation, test and prediction, ``forward`` of the module is replaced by S sampled
forwards, combined so that the result can stand in for the module's own output: for logits the **log of the mean
probability**, so that the user's cross-entropy and accuracy become those of the Monte-Carlo predictive. Forward hooks will
not do: under DDP a step runs through the module's forward.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.predictive import Link, PosteriorSamples, as_dict, check_link, combine, summarise


class PosteriorEvaluation:
    """Replaces a module's ``forward`` (and default ``predict_step``) while it is active.

    Args:
        module: The module.
        samples: The weight samples.
        link: How outputs become predictions.
        lenient: Whether to go on at the mean, with a warning, where outputs have no average. An epoch of training is worth
            more than an error in its validation.
    """

    def __init__(self, module: LightningModule, samples: PosteriorSamples, link: Link, lenient: bool = False) -> None:
        check_link(link)  # it may be the module's own attribute
        self.module, self.samples, self.link = module, samples, link
        self.lenient, self._at_mean = lenient, False
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
        if predict and type(self.module).predict_step is LightningModule.predict_step:
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
                f"{type(self.module).__name__}'s steps did not call self(...), so nothing was averaged over the posterior "
                "and the results are those of the mean. Call self(x) in the steps, or set eval_samples=0."
            )
        self._replaced = {}

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's outputs under every sample, ``[S, …]``."""
        self.calls += 1
        # The sampled forwards run the module itself, so inner calls of self(...) must not sample again.
        self.module.forward = self._forward  # type: ignore[method-assign]
        try:
            return self.samples.outputs(self.module, lambda: self._one(*args, **kwargs))
        finally:
            self.module.forward = self._combined  # type: ignore[method-assign]

    def _one(self, *args: Any, **kwargs: Any) -> Tensor:
        output = self._forward(*args, **kwargs)
        if not isinstance(output, Tensor):
            raise UnsupportedTrainingError(
                f"{type(self.module).__name__}.forward returned a {type(output).__name__}, which has no average. Return one "
                "tensor (logits or means), or set eval_samples=0 and use lightning_bayes.mc_predict."
            )
        return output

    def _combined(self, *args: Any, **kwargs: Any) -> Any:
        if self._at_mean:
            return self._forward(*args, **kwargs)
        try:
            return combine(self.outputs(*args, **kwargs), self.link)
        except UnsupportedTrainingError as error:
            if not self.lenient:
                raise
            rank_zero_warn(f"{error} Validation during the fit goes on at the posterior mean.")
            self._at_mean = True
            return self._forward(*args, **kwargs)

    def _predict_step(self, module: LightningModule, batch: Any, *args: Any) -> dict[str, Tensor]:
        inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
        with torch.no_grad():
            return as_dict(summarise(self.outputs(inputs), self.link))
