"""The interface of a module that wants more of the posterior samples than their average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class SampledModule(Protocol):
    """A module with these attributes sees each posterior sample in its evaluation steps.

    Evaluation callbacks replace the attributes while they are active and restore them afterwards. Any other module sees the
    average of the samples, as the result of ``self(...)``. `lightning_bayes.zoo.BayesClassifier` is an example.

    Attributes:
        averages: Whether `sampled_forward` returns several samples; False outside of such an evaluation.
        mean_forward: The output at the posterior mean, ``[batch, ...]``; None outside of such an evaluation, and where the
            samples have no mean.
    """

    averages: bool
    mean_forward: Callable[..., Tensor] | None

    def sampled_forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The outputs under each sample, ``[samples, batch, ...]``; outside of such an evaluation there is one."""
        ...


@runtime_checkable
class ScaledModule(SampledModule, Protocol):
    """A classifier that divides its logits by a temperature in tests and predictions.

    Attributes:
        temperature: The temperature; None to leave the logits alone.
    """

    temperature: float | None
