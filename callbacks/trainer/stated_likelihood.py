"""What modules state of their likelihood by an attribute."""

from __future__ import annotations

from typing import Final

from lightning.pytorch import LightningModule

from lightning_bayes.likelihood import Family, OutputLikelihood, find_kind

LINK_ATTRIBUTE: Final = "lightning_bayes_link"  # of modules that state their link; no other attribute is read
LIKELIHOOD_ATTRIBUTE: Final = "lightning_bayes_likelihood"  # of drawn labels, and of Laplace's curvature
OBSERVATION_ATTRIBUTE: Final = "lightning_bayes_observation"  # a method from outputs to the targets' distribution


def stated_by(module: LightningModule) -> OutputLikelihood | None:
    """The kind that a module's attributes state; None without them."""
    observation, link = getattr(module, OBSERVATION_ATTRIBUTE, None), getattr(module, LINK_ATTRIBUTE, None)
    if observation is not None:
        return Family(observation)
    return None if link is None else find_kind(link, LINK_ATTRIBUTE)
