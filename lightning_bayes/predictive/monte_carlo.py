"""The Monte-Carlo predictive: p(y | x) ≈ (1/S) Σ_s p(y | x, θ_s) with θ_s ~ q."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior
from lightning_bayes.predictive.closed_form import Linearized, seen_through
from lightning_bayes.predictive.links import Link, Moments, Prediction, check_link, summarise
from lightning_bayes.predictive.recalibration import recalibrate
from lightning_bayes.predictive.samples import PosteriorSamples, as_input, at_posterior_mean


@torch.no_grad()
def mc_predict(
    model: nn.Module,
    posterior: AbstractPosterior,
    x: Any,
    samples: int = 32,
    *,
    link: Link = "softmax",
    seed: int = 0,
    temperature: float = 1.0,
    recalibrate_on: Sequence[Any] = (),
    linearized: Linearized | None = None,
) -> Any:
    """Predict with weights sampled from the posterior.

    The model runs in evaluation mode with the posterior's constants (frozen parameters, BatchNorm statistics); its own
    weights and modes are back afterwards.

    Args:
        model: The trained architecture; its own weights do not matter.
        posterior: A posterior, from `load_posterior` or an optimizer's `posterior()`.
        x: Input of the model, one batch; a NumPy array becomes a tensor, floats in the precision of the weights.
        samples: S, at least 1.
        link: ``"softmax"`` for logits ``[B, C]``, ``"sigmoid"`` for Bernoulli logits, ``"identity"`` for regression.
        seed: Seed of the weight samples; equal seeds give equal samples for every batch.
        temperature: Logits of every sample are divided by it, see `fit_temperature`.
        recalibrate_on: Batches of training inputs on which BatchNorm's running statistics are estimated anew for each
            sample, see `recalibrate`; none keeps the posterior's. Linearised samples share those of the mean.
        linearized: True predicts with the model's first-order expansion around the mean, f(x, μ) + J (θ - μ), which stays
            sensible under wide posteriors; `LinearizedSamples` says which models allow it. ``"closed_form"`` predicts with
            that expansion without samples, see `lightning_bayes.predictive.closed_form`: logits by the probit approximation,
            one sample whose mutual information is 0; values with their mean and variance. None: as the width of a
            `ScaledPosterior` was chosen, else False.

    Returns:
        `Prediction` with ``probs [B, C]``, ``entropy [B]`` and ``mutual_information [B]`` in nats and ``sample_probs
        [S, B, C]``; `Moments` with ``mean``, ``variance`` and ``samples`` for the identity link.

    Raises:
        HyperparameterError: If `samples`, `link` or `temperature` is out of range.

    Example:
        >>> from lightning_bayes.posteriors import MeanField
        >>> model = nn.Linear(2, 3)
        >>> q = MeanField(
        ...     {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)},
        ...     {"weight": torch.ones(3, 2), "bias": torch.ones(3)},
        ...     {"weight": 1.0, "bias": 1.0},
        ...     num_data=1,
        ... )
        >>> p = mc_predict(model, q, torch.ones(5, 2), samples=8)
        >>> p.probs.shape, p.sample_probs.shape
        (torch.Size([5, 3]), torch.Size([8, 5, 3]))
    """
    check_link(link)
    if not temperature > 0 or (link == "identity" and temperature != 1):
        raise HyperparameterError(f"temperature={temperature} must be positive, and 1 for outputs that are not logits.")
    x = as_input(torch.as_tensor(x), next(model.parameters())) if isinstance(x, np.ndarray) else x
    if linearized is None:
        linearized = isinstance(posterior, ScaledPosterior) and posterior.linearized
    with at_posterior_mean(model, posterior):
        networks = PosteriorSamples(posterior.to(next(model.parameters()).device), samples, seed)
        draws = seen_through(networks, linearized, link)
        if len(recalibrate_on):
            batches = [partial(model, inputs) for inputs in recalibrate_on]
            draws = recalibrate(model, draws, batches, of="mean" if linearized else "sample")
        prediction: Prediction | Moments = summarise(draws.outputs(model, lambda: model(x)) / temperature, link)
        return prediction
