"""The likelihoods that belong to PyTorch's loss functions, for the Fisher of a user's loss.

    cross_entropy                       Softmax
    mse_loss                            Gaussian with variance ½: its negative log-likelihood is |f - y|² + constant
    binary_cross_entropy_with_logits    Bernoulli

The loss of an example is ℓ_i = -log p(y_i | f_i) / w + constant. With ``reduction="sum"``, w is 1. With ``"mean"``, w is the
number of terms per example: pixels or positions for the cross entropy, outputs for the other two.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.curvature.likelihood import Bernoulli, Gaussian, Likelihood, Softmax
from lightning_bayes.curvature.loss_functions import LossCall
from lightning_bayes.errors import UnsupportedTrainingError

LIKELIHOODS: dict[Callable[..., Tensor], Likelihood] = {
    F.cross_entropy: Softmax(),
    F.mse_loss: Gaussian(math.sqrt(0.5)),
    F.binary_cross_entropy_with_logits: Bernoulli(),
}
ADVICE = (
    "Return the result of F.cross_entropy, F.mse_loss or F.binary_cross_entropy_with_logits (or of their modules) "
    "unchanged, without other terms or factors."
)


def likelihood_call(call: LossCall | None, reader: str) -> LossCall:
    """A call of a function in `LIKELIHOODS`; refuse others, weights, ignored targets and ``reduction="none"``."""
    if call is None or call.function not in LIKELIHOODS:
        raise UnsupportedTrainingError(f"{reader} needs a loss that one supported loss function returns. {ADVICE}")
    name, target = call.function.__name__, call.targets
    unsupported = [option for option in ("weight", "pos_weight") if call.options.get(option) is not None]
    if unsupported:
        raise UnsupportedTrainingError(
            f"{reader} does not support {name} with {' and '.join(unsupported)}. Remove the argument."
        )
    if call.reduction == "none":
        raise UnsupportedTrainingError(
            f"{reader} needs a scalar from {name}, but reduction='none'. Use reduction='mean' or 'sum'."
        )
    is_soft = name == "cross_entropy" and target is not None and target.is_floating_point()
    if target is not None and is_soft and not torch.allclose(target.sum(1), torch.ones_like(target[:, 0])):
        raise UnsupportedTrainingError(
            f"{reader} needs probabilities that sum to 1 as floating-point targets of cross_entropy. Normalise them."
        )
    if call.counted is not None and not bool(call.counted.all()):
        raise UnsupportedTrainingError(
            f"{reader} does not support targets equal to ignore_index. Remove these examples from the batch."
        )
    return call


def num_terms(call: LossCall) -> int:
    """w, the number of terms whose mean is an example's loss."""
    return 1 if call.reduction == "sum" else call.num_values // len(call.outputs)
