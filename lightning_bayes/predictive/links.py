"""Combine a model's outputs under S posterior samples into one prediction. Probabilities are averaged, never logits."""

from __future__ import annotations

import difflib
import math
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.predictive.scores import entropy, mutual_information

Link: TypeAlias = Literal["softmax", "softmax_last", "sigmoid", "identity", "exp"]
CLASS_DIMS: Final[dict[str, int]] = {"softmax": 2, "softmax_last": -1}  # of outputs [S, B, …]
ClassificationName: TypeAlias = Literal["classification", "softmax", "categorical", "multiclass", "softmax_last"]
BinaryName: TypeAlias = Literal["binary", "multilabel", "sigmoid", "bernoulli"]
RegressionName: TypeAlias = Literal["regression", "identity", "gaussian", "normal"]
CountsName: TypeAlias = Literal["counts", "exp", "poisson"]
LikelihoodName: TypeAlias = ClassificationName | BinaryName | RegressionName | CountsName

LINKS: Final[dict[str, Link]] = {  # of each name, which is a likelihood's or a link's
    **dict.fromkeys(get_args(ClassificationName), "softmax"),
    **dict.fromkeys(get_args(BinaryName), "sigmoid"),
    **dict.fromkeys(get_args(RegressionName), "identity"),
    **dict.fromkeys(get_args(CountsName), "exp"),
    "softmax_last": "softmax_last",
}
_WORDS: Final = {"classification", "binary", "multilabel", "regression", "counts"}


class Prediction(NamedTuple):
    """A classifier's Monte-Carlo prediction; see `decomposition` for the units and equations."""

    probs: Tensor  # mean of sample_probs over samples: [B, C]; independent Bernoullis [B, …] for the sigmoid link
    entropy: Tensor  # total uncertainty in nats, [B]; one value per Bernoulli, [B, …], for the sigmoid link
    mutual_information: Tensor  # epistemic part in nats, shaped like the entropy
    sample_probs: Tensor  # [S, B, C], or [S, B, …] for the sigmoid link


class Moments(NamedTuple):
    """A regressor's Monte-Carlo prediction."""

    mean: Tensor  # mean over samples, [B, …]
    variance: Tensor  # epistemic variance over samples (population form), [B, …]
    samples: Tensor  # [S, B, …]


def find_link(name: str, argument: str = "link") -> Link:
    """The link of a name, which may be a likelihood's; `argument` has this value and is named in the message."""
    if name in LINKS:
        return LINKS[name]
    close = difflib.get_close_matches(str(name).lower(), LINKS, 1)
    question = f" Did you mean {close[0]!r}?" if close else ""
    raise HyperparameterError(
        f"{argument}={name!r} is unknown.{question} Use 'classification', 'binary', 'multilabel', 'regression' or 'counts', "
        f"or one of their synonyms {', '.join(repr(n) for n in LINKS if n not in _WORDS)}."
    )


def _check_shape(outputs: Tensor, link: Link) -> None:
    if link in CLASS_DIMS and (outputs.dim() < 3 or outputs.shape[CLASS_DIMS[link]] < 2):
        shape = "[samples, batch, classes, …]" if link == "softmax" else "[samples, batch, …, classes]"
        raise ShapeError(
            f"link={link!r} needs outputs of shape {shape} with at least two classes, got "
            f"{list(outputs.shape)}. Pass link='identity' for regression, or link='sigmoid' for one logit per example."
        )


def combine(outputs: Tensor, link: Link) -> Tensor:
    """Combine the outputs of all samples into one model output that represents the averaged prediction.

    Args:
        outputs: Model outputs under each sample, ``[S, B, C, …]`` logits or ``[S, B, …]`` values.
        link: ``"softmax"`` returns the log of the mean probability. Its softmax is the mean probability, so cross-entropy
            and accuracy score the averaged prediction. Raises `ShapeError` for fewer than two classes. ``"softmax_last"``
            is the same for classes in the last dimension, such as token logits ``[S, B, T, C]``. ``"sigmoid"``
            returns the logit of the mean probability, ``"exp"`` the log of the mean rate, ``"identity"`` the mean.

    Returns:
        ``[B, C, …]``, or ``[B, …]``.

    Example:
        >>> combine(torch.tensor([[[0.0, 0.0]], [[100.0, 0.0]]]), "softmax").softmax(-1)
        tensor([[0.7500, 0.2500]])
    """
    _check_shape(outputs, link)
    if link == "identity":
        return outputs.mean(0)
    if link == "exp":
        return outputs.logsumexp(0) - math.log(len(outputs))
    if link in CLASS_DIMS:
        return outputs.log_softmax(CLASS_DIMS[link]).logsumexp(0) - math.log(len(outputs))
    log_one = torch.nn.functional.logsigmoid(outputs).logsumexp(0)
    log_zero = torch.nn.functional.logsigmoid(-outputs).logsumexp(0)
    return log_one - log_zero


def predicted(outputs: Tensor, link: Link) -> Tensor:
    """Turn outputs under each sample, ``[S, B, …]``, into probabilities; unchanged for the identity link."""
    if link == "identity":
        return outputs
    if link == "exp":
        return outputs.exp()
    return outputs.softmax(CLASS_DIMS[link]) if link in CLASS_DIMS else outputs.sigmoid()


def summarise(outputs: Tensor, link: Link) -> Prediction | Moments:
    """`Moments` for the links ``"identity"`` and ``"exp"``, `Prediction` otherwise, from outputs as in `combine`."""
    _check_shape(outputs, link)
    samples = predicted(outputs, link)
    mean = samples.mean(0)
    if link in {"identity", "exp"}:
        return Moments(mean, samples.var(0, correction=0), samples)
    if link in CLASS_DIMS:
        dim = CLASS_DIMS[link]
        return Prediction(mean, entropy(mean, dim if dim < 0 else dim - 1), mutual_information(samples, dim), samples)
    both_labels = torch.stack([samples, 1 - samples], -1)
    return Prediction(mean, entropy(both_labels.mean(0)), mutual_information(both_labels), samples)


def as_dict(prediction: Prediction | Moments) -> dict[str, Any]:
    """Return the fields by name, without the samples, which would fill memory over a data set."""
    return {name: value for name, value in prediction._asdict().items() if name not in {"sample_probs", "samples"}}
