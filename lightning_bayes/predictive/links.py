"""Links by name, until every caller holds an `OutputLikelihood`."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from torch import Tensor

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood.base import OutputLikelihood
from lightning_bayes.likelihood.categorical import Categorical
from lightning_bayes.likelihood.names import LikelihoodName, find_kind
from lightning_bayes.likelihood.predictions import Moments, Prediction, as_dict, moments_of
from lightning_bayes.likelihood.raw import Raw
from lightning_bayes.likelihood.value import Likelihood

__all__ = [
    "CLASS_DIMS",
    "LikelihoodName",
    "Link",
    "Moments",
    "Prediction",
    "as_dict",
    "combine",
    "find_link",
    "kind_of",
    "link_of_kind",
    "link_of_likelihood",
    "predicted",
    "summarise",
]

Link: TypeAlias = Literal["softmax", "softmax_last", "sigmoid", "identity", "exp"]
CLASS_DIMS: Final[dict[str, int]] = {"softmax": 2, "softmax_last": -1}  # of outputs [S, B, …]
_LINKS: Final[dict[str, Link]] = {"bernoulli": "sigmoid", "gaussian": "identity", "poisson": "exp"}


def find_link(name: str, argument: str = "link") -> Link:
    """The link of a name, which may be a likelihood's; `argument` has this value and is named in the message."""
    kind = find_kind(name, argument)  # type: ignore[arg-type]
    if isinstance(name, str) and kind.name == "predicted_gaussian":
        raise HyperparameterError(f"{argument}={name!r} is no link.")
    return link_of_kind(kind)


def link_of_kind(kind: OutputLikelihood) -> Link:
    """The link of a likelihood; ``"identity"`` for outputs that are means already, and where it is not known."""
    if isinstance(kind, Categorical) and kind.is_logits:
        return "softmax" if kind.classes == 1 else "softmax_last"
    is_mean = not getattr(kind, "is_logits", getattr(kind, "is_log", True))
    return "identity" if is_mean else _LINKS.get(kind.name, "identity")


def kind_of(link: Link) -> OutputLikelihood:
    """The likelihood of a link."""
    return find_kind(link)


def combine(outputs: Tensor, link: Link) -> Tensor:
    """See `OutputLikelihood.combine`."""
    combined: Tensor = kind_of(link).combine(outputs)
    return combined


def predicted(outputs: Tensor, link: Link) -> Tensor:
    """Turn outputs under each sample, ``[S, B, …]``, into probabilities; unchanged for the identity link."""
    if link == "identity":
        return outputs
    if link == "exp":
        return outputs.exp()
    return outputs.softmax(CLASS_DIMS[link]) if link in CLASS_DIMS else outputs.sigmoid()


def summarise(outputs: Tensor, link: Link) -> Prediction | Moments:
    """`Moments` for the links ``"identity"`` and ``"exp"``, `Prediction` otherwise; see `OutputLikelihood.summarise`."""
    if link in {"identity", "exp"}:
        return moments_of(predicted(outputs, link))
    prediction = kind_of(link).summarise(outputs)
    assert isinstance(prediction, Prediction)
    return prediction


def link_of_likelihood(likelihood: Likelihood) -> Link | None:
    """The link that all outputs of a likelihood share; None if they do not, or if it is unknown."""
    links = {link_of_kind(s.kind) for s in likelihood.outputs if s.kind.state() != Raw().state()}
    return links.pop() if len(links) == 1 else None
