"""What the loss of a plain training loop says about the model's outputs, for the posterior of its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_bayes.likelihood import Likelihood
from lightning_bayes.likelihood.record import StepRecorder
from lightning_bayes.optim.groups import KEY


class HasLikelihood(Protocol):
    """An optimizer, whose first group holds the likelihood as plain data."""

    model: nn.Module

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups."""


@contextmanager
def likelihood_noted(optimizer: HasLikelihood, observe: Callable[[Tensor], None]) -> Iterator[Callable[[Tensor], None]]:
    """Context of a pass, which yields what is to get its loss: `observe`, after the first loss's likelihood is noted."""
    settings = optimizer.param_groups[0][KEY]
    if settings.get("likelihood") is not None:
        yield observe
        return
    recorder = StepRecorder(optimizer.model)

    def observe_first(loss: Tensor) -> None:
        settings["likelihood"] = recorder.likelihood(loss).state()
        observe(loss)

    recorder.start(())
    try:
        yield observe_first
    finally:
        recorder.stop()


def noted_likelihood(groups: Iterable[Mapping[str, Any]]) -> Likelihood | None:
    """The likelihood that a group holds; None before the first loss."""
    state = next((state for group in groups if (state := group[KEY].get("likelihood")) is not None), None)
    return None if state is None else Likelihood.of_state(state)
