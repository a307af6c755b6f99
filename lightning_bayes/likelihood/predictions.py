"""What a prediction holds, and the entropies of classes.

    H[p̄] = -Σ_c p̄_c log p̄_c        I = H[p̄] - (1/S) Σ_s H[p_s]        p̄ = (1/S) Σ_s p_s

The entropy is the total uncertainty; the mutual information I between label and weights is its epistemic part.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_bayes.errors import ShapeError


class Prediction(NamedTuple):
    """A classifier's prediction; one value per example, or per example and position, or per Bernoulli."""

    probs: Tensor  # mean of sample_probs over samples: [B, C, …], or [B, …] for Bernoullis
    entropy: Tensor  # total uncertainty in nats, [B, …]
    mutual_information: Tensor  # epistemic part in nats, shaped like the entropy
    sample_probs: Tensor  # [S, B, C, …], or [S, B, …] for Bernoullis


class Moments(NamedTuple):
    """A prediction of values whose noise is not known."""

    mean: Tensor  # mean over samples, [B, …]
    variance: Tensor  # epistemic variance over samples (population form), [B, …]
    samples: Tensor  # [S, B, …]


class Observed(NamedTuple):
    """A prediction of targets with noise. All values are ``[B, …]``."""

    mean: Tensor  # of the target
    aleatoric: Tensor  # variance of the noise, averaged over samples
    epistemic: Tensor  # variance of the mean over samples
    lower: Tensor  # ends of the central interval
    upper: Tensor


AnyPrediction: TypeAlias = Prediction | Moments | Observed
_OF_SAMPLES = {"sample_probs", "samples"}


def as_dict(prediction: AnyPrediction) -> dict[str, Any]:
    """Return the fields by name, without the samples, which would fill memory over a data set."""
    return {name: value for name, value in prediction._asdict().items() if name not in _OF_SAMPLES}


def moments_of(samples: Tensor) -> Moments:
    """`Moments` of values under each sample, ``[S, B, …]``."""
    return Moments(samples.mean(0), samples.var(0, correction=0), samples)


def entropy(probs: Tensor, dim: int = -1) -> Tensor:
    """Shannon entropy in nats of probabilities that sum to one along `dim`, which the result lacks."""
    terms: Tensor = torch.special.entr(probs)
    return terms.sum(dim)


def mutual_information(sample_probs: Tensor, dim: int = -1) -> Tensor:
    """Mutual information between label and weights (BALD) in nats, ``[B, …]``, from probabilities ``[S, B, …]``."""
    if sample_probs.dim() < 3:
        raise ShapeError(f"sample_probs has shape {tuple(sample_probs.shape)}; expected [samples, batch, …, classes].")
    expected = entropy(sample_probs, dim).mean(0)
    return (entropy(sample_probs.mean(0), dim if dim < 0 else dim - 1) - expected).clamp_min(0)
