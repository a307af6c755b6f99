"""Deep ensembles, with members as samples (Lakshminarayanan et al. 2017, https://arxiv.org/abs/1612.01474)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import final

from torch import Tensor, nn

from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive.samples import NetworkSamples, PosteriorSamples, temporary_weights


@final
class MemberSamples(NetworkSamples):
    """M networks of one architecture, trained independently: the parameters and buffers of each, by name."""

    has_mean = False

    def __init__(self, members: Sequence[dict[str, Tensor]]) -> None:
        self.members, self.count = list(members), len(members)

    def sampled(self, model: nn.Module, index: int) -> AbstractContextManager[None]:
        """Context in which `model` is member `index`."""
        return temporary_weights(model, self.members[index])


@final
class MemberPosteriors(NetworkSamples):
    """S networks from each of M posteriors around independently trained networks, as in Multi-SWAG."""

    has_mean = False

    def __init__(self, posteriors: Sequence[AbstractPosterior], count: int, seed: int = 0) -> None:
        self.members = [PosteriorSamples(q, count, seed + member) for member, q in enumerate(posteriors)]
        self.count = count * len(self.members)

    def sampled(self, model: nn.Module, index: int) -> AbstractContextManager[None]:
        """Context in which `model` is a sample of one member, with the member's constants; members alternate."""
        sample_index, member = divmod(index, len(self.members))
        samples = self.members[member]
        return temporary_weights(model, {**samples.posterior.constants, **samples.tensors(sample_index)})
