"""One prediction from a model's outputs under S posterior samples: probabilities are averaged, never logits."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.predictive.decomposition import entropy, mutual_information

Link: TypeAlias = Literal["softmax", "sigmoid", "identity"]


class Prediction(NamedTuple):
    """A classifier's Monte-Carlo prediction; see `decomposition` for the units and equations."""

    probs: Tensor  # mean of sample_probs: [B, C], or [B, …] of independent Bernoullis for the sigmoid link
    entropy: Tensor  # total uncertainty in nats, [B]; with the sigmoid link of each Bernoulli, [B, …]
    mutual_information: Tensor  # epistemic part in nats, shaped like the entropy
    sample_probs: Tensor  # [S, B, C]


class Moments(NamedTuple):
    """A regressor's Monte-Carlo prediction."""

    mean: Tensor  # of the samples, [B, …]
    variance: Tensor  # epistemic variance over the samples (population form), [B, …]
    samples: Tensor  # [S, B, …]


def check_link(link: str) -> None:
    """Require a known link.

    Args:
        link: Its name.

    Raises:
        HyperparameterError: If it is unknown.
    """
    if link not in {"softmax", "sigmoid", "identity"}:
        raise HyperparameterError(f"link={link!r} is unknown; use 'softmax', 'sigmoid' or 'identity'.")


def _check_shape(outputs: Tensor, link: Link) -> None:
    if link == "softmax" and (outputs.dim() < 3 or outputs.shape[2] < 2):
        raise ShapeError(
            f"link='softmax' needs outputs of shape [samples, batch, classes, …] with at least two classes, got "
            f"{list(outputs.shape)}. Pass link='identity' for regression, or link='sigmoid' for one logit per example."
        )


def combine(outputs: Tensor, link: Link) -> Tensor:
    """One output that stands for the average prediction and can take the place of the model's own.

    Args:
        outputs: Model outputs under each sample, ``[S, B, C, …]`` logits or ``[S, B, …]`` values.
        link: ``"softmax"``: log of the mean probability, whose softmax is the mean probability, so cross-entropy and
            accuracy become those of the average (a `ShapeError` below two classes); ``"sigmoid"``: logit of the mean;
            ``"identity"``: the mean.

    Returns:
        ``[B, C, …]``, or ``[B, …]``.

    Example:
        >>> combine(torch.tensor([[[0.0, 0.0]], [[100.0, 0.0]]]), "softmax").softmax(-1)
        tensor([[0.7500, 0.2500]])
    """
    _check_shape(outputs, link)
    if link == "identity":
        return outputs.mean(0)
    count = math.log(len(outputs))
    if link == "softmax":
        return outputs.log_softmax(2).logsumexp(0) - count
    log_one = torch.nn.functional.logsigmoid(outputs).logsumexp(0)
    log_zero = torch.nn.functional.logsigmoid(-outputs).logsumexp(0)
    return log_one - log_zero


def predicted(outputs: Tensor, link: Link) -> Tensor:
    """Predictions from outputs: probabilities, or the values themselves.

    Args:
        outputs: As in `combine`.
        link: As in `combine`.

    Returns:
        Shaped like the outputs.
    """
    if link == "identity":
        return outputs
    return outputs.softmax(2) if link == "softmax" else outputs.sigmoid()


def summarise(outputs: Tensor, link: Link) -> Prediction | Moments:
    """Everything a prediction should tell.

    Args:
        outputs: As in `combine`.
        link: As in `combine`.

    Returns:
        `Moments` for the identity link, `Prediction` otherwise.
    """
    _check_shape(outputs, link)
    each = predicted(outputs, link)
    if link == "identity":
        return Moments(each.mean(0), each.var(0, correction=0), each)
    if link == "softmax":
        return Prediction(each.mean(0), entropy(each.mean(0), 1), mutual_information(each, 2), each)
    both = torch.stack([each, 1 - each], -1)
    return Prediction(each.mean(0), entropy(both.mean(0)), mutual_information(both), each)


def as_dict(prediction: Prediction | Moments) -> dict[str, Any]:
    """The named parts without the samples, which would fill memory over a data set."""
    return {k: v for k, v in prediction._asdict().items() if k not in {"sample_probs", "samples"}}
