"""Scores that detect out-of-distribution (OOD) inputs, for a sampled posterior or a single network.

A higher score means more OOD.

    max probability    -max_c p̄_c         Hendrycks & Gimpel 2017, https://arxiv.org/abs/1610.02136
    entropy            H[p̄]               in nats
    mutual information I                  in nats, of samples only
    energy             -log Σ_c exp f̄_c   Liu et al. 2020, https://arxiv.org/abs/2010.03759, at temperature 1
    max logit          -max_c f̄_c         Hendrycks et al. 2022, https://arxiv.org/abs/1911.11132

p̄ is the mean of the samples' probabilities, f̄ the mean of their logits. The last two scores were published for one network.
Here they score the mean logits. Samples that are confident in different classes cancel in this mean, whereas the mean of
their scores would rate such an input as in-distribution.

Entropy is the total uncertainty, of which the mutual information is the epistemic part:

    H[p̄] = -Σ_c p̄_c log p̄_c        I = H[p̄] - (1/S) Σ_s H[p_s]
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_bayes.errors import ShapeError
from lightning_bayes.likelihood.predictions import entropy, mutual_information


def max_probability_score(outputs: Tensor) -> Tensor:
    """Negative of the largest probability of the averaged prediction, ``[batch]``; -1 is certain."""
    return -_samples(outputs).softmax(-1).mean(0).amax(-1)


def entropy_score(outputs: Tensor) -> Tensor:
    """Entropy of the averaged prediction in nats: the total uncertainty, ``[batch]``."""
    return entropy(_samples(outputs).softmax(-1).mean(0))


def mutual_information_score(outputs: Tensor) -> Tensor:
    """Disagreement among the samples in nats: the epistemic part of the entropy, ``[batch]``."""
    if outputs.ndim != 3:
        raise ShapeError(
            f"The mutual information needs the logits of several samples, [samples, batch, classes], got "
            f"{list(outputs.shape)}. It is undefined for a single network: use the entropy."
        )
    return mutual_information(_samples(outputs).softmax(-1))


def energy_score(outputs: Tensor) -> Tensor:
    """Free energy of the averaged logits, ``[batch]``."""
    return -_samples(outputs).mean(0).logsumexp(-1)


def max_logit_score(outputs: Tensor) -> Tensor:
    """Negative of the largest averaged logit, ``[batch]``."""
    return -_samples(outputs).mean(0).amax(-1)


OOD_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "entropy": entropy_score,
    "max_probability": max_probability_score,
    "mutual_information": mutual_information_score,
    "energy": energy_score,
    "max_logit": max_logit_score,
}


def ood_scores(outputs: Tensor) -> dict[str, Tensor]:
    """All scores by name, ``[batch]`` each; without the mutual information for outputs ``[batch, classes]``."""
    names = [name for name in OOD_SCORES if name != "mutual_information" or outputs.ndim == 3]
    return {name: OOD_SCORES[name](outputs) for name in names}


def _samples(outputs: Tensor) -> Tensor:
    if outputs.ndim not in {2, 3} or outputs.shape[-1] < 2:
        raise ShapeError(
            f"OOD scores need logits [samples, batch, classes] or [batch, classes] of at least two classes, got "
            f"{list(outputs.shape)}."
        )
    return outputs if outputs.ndim == 3 else outputs.unsqueeze(0)
