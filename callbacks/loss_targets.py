"""What Laplace requires of a training loss: targets of the batch, and one Gaussian, Poisson or class likelihood."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Final

import torch
from torch import Tensor

from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.likelihood.loss_functions import LossCall
from lightning_bayes.predictive.recorded_noise import RecordedNoise

_NOISE: Final = {"gaussian_nll_loss", "Normal", "poisson_nll_loss"}  # recorded families that `laplace` knows
_OF_LOGITS: Final = {  # the losses of means, and what takes their logits or logarithms
    "binary_cross_entropy": "F.binary_cross_entropy_with_logits",
    "nll_loss": "F.cross_entropy",
    "cross_entropy": "F.cross_entropy",
    "poisson_nll_loss": "F.poisson_nll_loss(log_input=True)",
}
_ROBUST: Final = {"l1_loss", "smooth_l1_loss", "huber_loss"}  # whose noise has longer tails than a Gaussian


def changed_targets(batch: Any, targets: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """The sorted values that a training step gave its loss, and those of the batch, if it changed them."""
    given = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
    if not isinstance(given, Tensor):
        return None
    of_batch = given.flatten().double().sort().values
    used = [each.flatten().to(of_batch).sort().values for each in targets if each.numel() == given.numel()]
    if not used or any(torch.allclose(each, of_batch, equal_nan=True) for each in used):
        return None
    return used[0], of_batch


def obstacle_of(targets: Tensor, calls: list[LossCall]) -> str:
    """Why a loss shows that the targets of a batch are not its own; empty if it does not."""
    if any(call.counted is not None and not bool(call.counted.all()) for call in calls):
        return "the loss ignores some targets"
    used = [call.targets.detach() for call in calls if call.targets is not None]
    return (
        "" if changed_targets((None, targets), used) is None else "the training step changes the targets of its batch"
    )


def require_targets_of_batch(batch: Any, targets: list[Tensor]) -> None:
    """Refuse a training step that changes the targets' values, such as their unit: Laplace reads those of the batch."""
    changed = changed_targets(batch, targets)
    if changed is not None:
        used, of_batch = changed
        raise UnsupportedTrainingError(
            f"The loss gets targets from {float(used[0]):.4g} to {float(used[-1]):.4g}, but those of the batch are "
            f"from {float(of_batch[0]):.4g} to {float(of_batch[-1]):.4g}, and Laplace reads them there. Standardise or "
            "shift the targets in the data set."
        )


def require_known_noise(noise: RecordedNoise | None) -> None:
    """Refuse a loss whose noise the network predicts, or that is neither Gaussian nor Poisson."""
    if noise is not None and not (noise.has_one_output and noise.family in _NOISE):
        raise UnsupportedTrainingError(
            f"The loss ({noise.family}) gives each target a noise of its own, but Laplace knows one Gaussian noise or "
            "Poisson counts. Use VOGNCallback, SWAGCallback or DeepEnsembleCallback, train the mean alone with "
            "F.mse_loss, or pass likelihood=..."
        )


def require_gaussian(functions: Set[str]) -> None:
    """Refuse losses of probabilities or rates, and robust ones: their targets are not Gaussian around the outputs."""
    for name in sorted(functions & _ROBUST):
        raise UnsupportedTrainingError(
            f"{name} is the likelihood of noise with longer tails than a Gaussian, but Laplace knows one Gaussian noise "
            "for all targets. Train with F.mse_loss, pass likelihood='regression' to fit a Gaussian around the outputs, "
            "or use VOGNCallback, SWAGCallback or DeepEnsembleCallback."
        )
    for name in functions & _OF_LOGITS.keys():
        raise UnsupportedTrainingError(
            f"The network returns the means of its targets, of which {name} takes the logarithm, but Laplace needs "
            f"logits or log-rates. Return them from forward and train with {_OF_LOGITS[name]}."
        )
