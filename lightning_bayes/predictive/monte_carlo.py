"""The Monte-Carlo predictive: p(y | x) ≈ (1/S) Σ_s p(y | x, θ_s) with θ_s ~ q."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood import LinkArgument
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive.closed_form import Linearized, predictive_samples
from lightning_bayes.predictive.known_outputs import called, kind_of_outputs, known_outputs, predicted
from lightning_bayes.predictive.recalibration import recalibrate
from lightning_bayes.predictive.samples import PosteriorSamples, as_input, at_posterior_mean


class HasPosterior(Protocol):
    """A result that holds a posterior, such as that of `lightning_bayes.laplace`."""

    @property
    def posterior(self) -> AbstractPosterior:
        """The posterior."""


@torch.no_grad()
def mc_predict(
    model: nn.Module,
    posterior: AbstractPosterior | HasPosterior,
    x: Any,
    samples: int = 32,
    *,
    link: LinkArgument | None = None,
    seed: int = 0,
    temperature: float | None = None,
    recalibrate_on: Sequence[Any] = (),
    linearized: Linearized | None = None,
) -> Any:
    """Predict with weights sampled from the posterior.

    The model runs in evaluation mode with the posterior's constants (frozen parameters, BatchNorm statistics). Its own
    weights and modes are restored afterwards.

    Args:
        model: The trained architecture. Its own weights are not used.
        posterior: A posterior that fits the model, from `load_posterior` or an optimizer's `posterior()`; or the result of
            `laplace`.
        x: One batch of model inputs: a tensor, a tuple of several arguments, or a dictionary by the names of arguments; or a
            batch as the training loader yields it. A NumPy array becomes a tensor on the device of the weights; a
            floating-point array is also cast to their dtype.
        samples: S, at least 1. The average of several samples is exactly the posterior mean; see `PosteriorSamples`.
        link: What the outputs are, as in the callbacks: ``"classification"``, ``"binary"``, ``"regression"``, ``"counts"``,
            …. None: what the training loss has told (`AbstractPosterior.likelihood`). Where neither tells, raw outputs are
            averaged, with a warning.
        seed: Seed of the weight samples. The same seed gives the same samples for every batch.
        temperature: Divides the logits of every sample; see `fit_temperature`. None uses the posterior's, which is 1 unless
            `calibrate` has chosen one.
        recalibrate_on: Batches of training inputs. BatchNorm's running statistics are estimated on them for each sample;
            see `recalibrate`. An empty sequence keeps the posterior's statistics. Linearised samples all use the
            statistics of the mean.
        linearized: True predicts with the model's first-order expansion around the mean, f(x, μ) + J (θ - μ), which still
            works under wide posteriors; see `LinearizedSamples` for the supported models. ``"closed_form"`` evaluates the
            expansion without sampling; see `lightning_bayes.predictive.closed_form`. For logits it uses the probit
            approximation; S draws of logits with this average give the mutual information. For regression it uses the
            exact mean and variance. None uses the setting with which the scale of a `ScaledPosterior` was fitted, otherwise
            False.

    Returns:
        `Prediction` with ``probs [B, C]``, ``entropy [B]`` and ``mutual_information [B]`` in nats, and ``sample_probs
        [S, B, C]``. `Moments` with ``mean``, ``variance`` and ``samples`` for values, `Observed` if their noise is known. If
        the training loss takes several outputs, one of these for each, in the structure of the model's output.

    Raises:
        HyperparameterError: If `samples`, `link`, `temperature` or `linearized` is invalid, or `link` contradicts the loss.
    """
    if not isinstance(posterior, AbstractPosterior):
        posterior = posterior.posterior
    known = known_outputs(posterior, link, stacklevel=4)
    if temperature is None:
        temperature = posterior.temperature
    has_temperature = any(scored.kind.has_temperature for scored in known.outputs)
    if not temperature > 0 or (not has_temperature and temperature != 1):
        raise HyperparameterError(f"temperature={temperature} must be positive, and 1 for outputs that are not logits.")
    weight = next(model.parameters())
    if isinstance(x, np.ndarray):
        x = as_input(torch.as_tensor(x), weight)
    if linearized is None:
        linearized = posterior.linearized
    with at_posterior_mean(model, posterior):
        drawn = PosteriorSamples(posterior.to(weight.device), samples, seed)
        draws = predictive_samples(drawn, linearized, kind_of_outputs(known))
        if len(recalibrate_on):
            batches = [called(model, known, inputs) for inputs in recalibrate_on]
            draws = recalibrate(model, draws, batches, of="mean" if linearized else "sample")
        return predicted(model, draws, known, called(model, known, x), temperature)
