"""The evaluation of a network that no other callback samples, so that a calibration can change its predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_bayes.callbacks.evaluation.base import EvaluationCallback
from lightning_bayes.predictive import Samples
from lightning_bayes.predictive.nested import stacked


class PointSamples(Samples):
    """The network as it is, as one sample."""

    count, has_mean = 1, False

    def subset_outputs(self, model: nn.Module, forward: Callable[[], Any], indices: Iterable[int]) -> Any:
        """Run `forward` once for each index; see `Samples.subset_outputs`."""
        return stacked([forward() for _ in indices])


@final
class PointEstimate(EvaluationCallback):
    """Evaluates the user's network outside of a fit, where other callbacks may change its predictions."""

    opt_out_hint = "remove Calibration"

    def __init__(self) -> None:
        super().__init__(None)

    def find_samples(self, trainer: Trainer, pl_module: LightningModule) -> Samples | None:
        """The network; None for validation in a fit, which stays as it is."""
        return None if trainer.state.fn == "fit" and trainer.validating else PointSamples()

    def state_dict(self) -> dict[str, Any]:
        """What the training loss told."""
        return self.loss_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what the training loss told."""
        self.load_loss_state(state_dict)
