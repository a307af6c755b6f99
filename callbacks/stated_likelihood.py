"""What modules state of their likelihood by an attribute, and the link of a likelihood."""

from __future__ import annotations

from typing import Final

from lightning.pytorch import LightningModule

from lightning_bayes.likelihood import (
    Bernoulli,
    Categorical,
    Family,
    Likelihood,
    OutputLikelihood,
    Poisson,
    Raw,
    find_kind,
)
from lightning_bayes.predictive import Link

LINK_ATTRIBUTE: Final = "lightning_bayes_link"  # of modules that state their link; no other attribute is read
OBSERVATION_ATTRIBUTE: Final = "lightning_bayes_observation"  # a method from outputs to the targets' distribution


def stated_by(module: LightningModule) -> OutputLikelihood | None:
    """The kind that a module's attributes state; None without them."""
    observation, link = getattr(module, OBSERVATION_ATTRIBUTE, None), getattr(module, LINK_ATTRIBUTE, None)
    if observation is not None:
        return Family(observation)
    return None if link is None else find_kind(link, LINK_ATTRIBUTE)


def link_of_likelihood(likelihood: Likelihood) -> Link | None:
    """The link that all outputs of a likelihood share; None if they do not, or if it is unknown."""
    links = {_link_of(scored.kind) for scored in likelihood.outputs}
    return links.pop() if len(links) == 1 else None


def _link_of(kind: OutputLikelihood) -> Link | None:
    if isinstance(kind, Categorical) and kind.is_logits:
        names: dict[int, Link] = {1: "softmax", -1: "softmax_last"}
        return names.get(kind.classes)
    if isinstance(kind, Bernoulli) and kind.is_logits:
        return "sigmoid"
    if isinstance(kind, Poisson) and kind.is_log:
        return "exp"
    return None if isinstance(kind, Raw) and not kind.why else "identity"
