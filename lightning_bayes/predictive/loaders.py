"""Predictions under posterior samples for every example of a data loader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.errors import DataError
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive.closed_form import Linearized, predictive_samples
from lightning_bayes.predictive.links import Link, find_link, predicted
from lightning_bayes.predictive.repeated import Repeatable
from lightning_bayes.predictive.samples import PosteriorSamples, at_posterior_mean


@torch.no_grad()
def predict_loader(
    model: nn.Module,
    posterior: AbstractPosterior,
    loader: Iterable[Any],
    samples: int = 32,
    *,
    link: Link = "softmax",
    seed: int = 0,
    linearized: Linearized = False,
) -> Tensor:
    """Predict every example of a loader under each posterior sample. All batches use the same weight samples.

    Args:
        model: The trained architecture, called with the inputs of a batch. Its own weights are not used.
        posterior: A posterior, from `load_posterior` or an optimizer's `posterior()`.
        loader: Batches of inputs, or tuples or lists whose first item is the inputs; not shuffled.
        samples: S, at least 1.
        link: ``"softmax"`` for logits, ``"sigmoid"`` for Bernoulli logits, ``"identity"`` for values.
        seed: Seed of the weight samples.
        linearized: False, True or ``"closed_form"``; see `mc_predict`. The setting stored in a `ScaledPosterior` is ignored;
            its temperature divides the logits.

    Returns:
        Probabilities or values, ``[S, N, …]``, on the CPU.

    Raises:
        DataError: If the loader yields no batch.

    Example:
        >>> from lightning_bayes.posteriors import MeanField
        >>> model = nn.Linear(2, 3, bias=False)
        >>> q = MeanField({"weight": torch.zeros(3, 2)}, {"weight": torch.ones(3, 2)}, {"weight": 1.0}, num_data=1)
        >>> predict_loader(model, q, [torch.ones(5, 2), torch.ones(4, 2)], samples=8).shape
        torch.Size([8, 9, 3])
    """
    link = find_link(link)
    device = next(model.parameters()).device
    draws = predictive_samples(PosteriorSamples(posterior.to(device), samples, seed), linearized, link)
    parts = []
    with at_posterior_mean(model, posterior):
        for batch in loader:
            inputs = (batch[0] if isinstance(batch, (tuple, list)) else batch).to(device)
            outputs = draws.outputs(model, Repeatable(model, inputs))
            parts.append(predicted(outputs / posterior.temperature, link).cpu())
    if not parts:
        raise DataError("The loader yields no batch, so there is nothing to predict. Pass one with examples.")
    return torch.cat(parts, 1)
