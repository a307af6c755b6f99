"""Sensitivity to single training examples, and leave-one-out predictions, without training again.

    e_i = ∂ℓ_i/∂f at f_i       residual: p - y for classes, (f - y)/σ² for values
    V_i = J_i Σ J_iᵀ           covariance of the outputs under the posterior
    f_i without i  ≈  f_i + V_i e_i                                  Nickl et al. 2023, https://arxiv.org/abs/2310.19273
    f_i without i  ≈  f_i + (I - V_i H_i)⁻¹ V_i e_i                  with ``corrected=True``; H_i = ∂²ℓ_i/∂f²

Removing an example moves the outputs by residual times variance: this memory-perturbation equation is one natural-gradient
step away from the posterior. The second form also takes the example's curvature out of Σ. It is exact for linear models with
Gaussian noise, and Newton's first step for other linear models. For networks with more weights than examples V H comes near
1, and the second form overshoots. Both suppose a posterior of the untempered likelihood, at a stationary point, which has
seen the examples: the linearised V of weights that no data constrain is large.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import Likelihood, Softmax
from lightning_bayes.errors import DataError, HyperparameterError
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive.closed_form import output_covariance
from lightning_bayes.predictive.linearized import LinearizedSamples
from lightning_bayes.predictive.samples import PosteriorSamples, at_posterior_mean


class LeaveOneOut(NamedTuple):
    """Predictions of every training example by a posterior that has not seen it.

    Attributes:
        outputs: f_i without example i, ``[N, C]``.
        nll: Negative log-likelihood of each, in nats, ``[N]``; its mean estimates the NLL on new data.
        change: f_i without i less f_i, ``[N, C]``.
    """

    outputs: Tensor
    nll: Tensor
    change: Tensor

    @property
    def sensitivity(self) -> Tensor:
        """‖V_i e_i‖, ``[N]``; see `sensitivity`."""
        lengths: Tensor = torch.linalg.vector_norm(self.change, dim=1)
        return lengths


def leave_one_out(
    model: nn.Module,
    posterior: AbstractPosterior,
    loader: Iterable[Any],
    likelihood: Likelihood | None = None,
    *,
    corrected: bool = False,
    samples: int | None = None,
) -> LeaveOneOut:
    """Predict every training example as if the posterior had not seen it.

    Args:
        model: The trained architecture; its own weights do not matter.
        posterior: A posterior of any family.
        loader: Batches ``(inputs, targets)`` of the training set, not shuffled and not augmented.
        likelihood: The likelihood of the targets, `Softmax` by default; `Gaussian` and `Bernoulli` take targets shaped
            like the outputs.
        corrected: Whether the example's own curvature leaves Σ too: for linear models. Where I - V H is not positive, as no
            posterior that has seen the example has it, the first form is used.
        samples: Estimates V from as many linearised samples, for many outputs; None computes it by C (C + 1)/2 backwards.

    Returns:
        The predictions.

    Raises:
        DataError: If the loader has no batch.
        HyperparameterError: If there are fewer than two samples.

    Example:
        >>> from lightning_bayes.curvature import Gaussian
        >>> from lightning_bayes.posteriors import MeanField
        >>> model = nn.Linear(1, 1, bias=False)
        >>> q = MeanField({"weight": torch.ones(1, 1)}, {"weight": torch.full((1, 1), 4.0)}, {"weight": 1.0}, num_data=3)
        >>> batch = torch.ones(3, 1), torch.tensor([[0.0], [2.0], [2.0]])  # mean 4/4 with a prior precision of 1
        >>> leave_one_out(model, q, [batch], Gaussian(1.0), corrected=True).outputs[:, 0]  # 4/3 is (2 + 2) / 3
        tensor([1.3333, 0.6667, 0.6667])
    """
    if samples is not None and samples < 2:
        raise HyperparameterError(f"samples={samples} must be at least 2, or None for the exact covariance.")
    likelihood = Softmax() if likelihood is None else likelihood
    device = next(model.parameters()).device
    placed_posterior = posterior.to(device)
    parts = []
    with at_posterior_mean(model, posterior):
        for inputs, targets in loader:
            outputs, covariance = _moments(model, placed_posterior, inputs.to(device), samples)
            parts.append(_without_each(outputs, covariance, targets.to(device), likelihood, corrected))
    if not parts:
        raise DataError(
            "The loader has no batch, so there is no example to leave out. Give one with training examples."
        )
    return LeaveOneOut(*(torch.cat(each).cpu() for each in zip(*parts, strict=True)))


def sensitivity(
    model: nn.Module,
    posterior: AbstractPosterior,
    loader: Iterable[Any],
    likelihood: Likelihood | None = None,
    *,
    samples: int | None = None,
) -> Tensor:
    """How far a training example's own outputs would move without it: residual times predictive variance.

    Examples of large sensitivity are wrongly labelled, rare or hard.

    Args:
        model: As in `leave_one_out`.
        posterior: As in `leave_one_out`.
        loader: As in `leave_one_out`.
        likelihood: As in `leave_one_out`.
        samples: As in `leave_one_out`.

    Returns:
        ‖V_i e_i‖, ``[N]``, in the unit of the outputs.
    """
    return leave_one_out(model, posterior, loader, likelihood, samples=samples).sensitivity


def _moments(
    model: nn.Module, posterior: AbstractPosterior, inputs: Tensor, samples: int | None
) -> tuple[Tensor, Tensor]:
    """f, shaped as the model gives it, and V ``[B, C, C]``."""
    with torch.no_grad():
        mean: Tensor = model(inputs)
        if samples is None:
            return mean, output_covariance(model, posterior, lambda: model(inputs))[1]
        draws = LinearizedSamples(PosteriorSamples(posterior, samples)).outputs(model, lambda: model(inputs))
        away = (draws - mean).flatten(2) if mean.dim() > 1 else (draws - mean)[..., None]
    return mean, torch.einsum("sbi,sbj->bij", away, away) / samples


def _without_each(
    outputs: Tensor, covariance: Tensor, targets: Tensor, likelihood: Likelihood, corrected: bool
) -> tuple[Tensor, Tensor, Tensor]:
    residual = _residual(outputs, targets, likelihood)
    change = torch.einsum("bij,bj->bi", covariance, residual)
    if corrected:
        root = torch.stack([likelihood.root(outputs, c).reshape(residual.shape) for c in range(residual.shape[1])], 2)
        change = _corrected(change, covariance, root)
    without = outputs + change.view_as(outputs)
    return without.reshape(residual.shape), likelihood.nll(without, targets), change


def _residual(outputs: Tensor, targets: Tensor, likelihood: Likelihood) -> Tensor:
    """∂ℓ_i/∂f, ``[B, C]``."""
    with torch.enable_grad():
        leaf = outputs.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(likelihood.nll(leaf, targets).sum(), leaf)
    return gradient.reshape(len(outputs), -1)


def _corrected(change: Tensor, covariance: Tensor, root: Tensor) -> Tensor:
    """(I - V H)⁻¹ (V e) with H = R Rᵀ, as V e + V R (I - Rᵀ V R)⁻¹ Rᵀ V e."""
    left = root.mT @ covariance
    values, vectors = torch.linalg.eigh(left @ root)
    possible = values.amax(1) < 1
    shrunk = 1 / (1 - torch.where(possible[:, None], values, 0.0))
    weights = vectors @ (shrunk[..., None] * (vectors.mT @ (root.mT @ change[..., None])))
    more = (left.mT @ weights)[..., 0]
    return change + torch.where(possible[:, None], more, 0.0)
