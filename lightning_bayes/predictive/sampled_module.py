"""Interfaces of modules that see individual posterior samples in evaluation, not only their average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class SampledModule(Protocol):
    """A module whose evaluation steps see the outputs of every posterior sample.

    Evaluation callbacks replace these attributes while they are active and restore them afterwards. In a module without
    them, ``self(...)`` returns the average over samples. `lightning_bayes.zoo.BayesClassifier` is an example.

    Attributes:
        averages: Whether `sampled_forward` returns several samples; False unless an evaluation callback is active.
        mean_forward: Computes the output at the posterior mean, ``[batch, ...]``. None unless an evaluation callback is
            active and its samples have a mean.
    """

    averages: bool
    mean_forward: Callable[..., Tensor] | None

    def sampled_forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The outputs under each sample, ``[samples, batch, ...]``; one sample unless a callback is active."""
        ...
