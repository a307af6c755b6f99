"""Sensitivity to single training examples, and leave-one-out predictions, without retraining.

    e_i = ∂ℓ_i/∂f at f_i       residual: p - y for classes, (f - y)/σ² for values
    V_i = J_i Σ J_iᵀ           covariance of the outputs under the posterior
    f_i without i  ≈  f_i + V_i e_i                                  Nickl et al. 2023, https://arxiv.org/abs/2310.19273
    f_i without i  ≈  f_i + (I - V_i H_i)⁻¹ V_i e_i                  with ``corrected=True``; H_i = ∂²ℓ_i/∂f²

Removing an example changes the outputs by residual times variance. This memory-perturbation equation is one natural-gradient
step from the posterior. The corrected form also removes the example's curvature from Σ. It is exact for linear models with
Gaussian noise, and the first Newton step for other linear models. For networks with more weights than examples, the
eigenvalues of V H approach 1 and the corrected form overshoots.

Both forms assume a posterior of the untempered likelihood, at a stationary point of these examples. The linearised V is
large for weights that no data constrain.
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
    """Approximate predictions for every training example by a posterior that has not seen it.

    Attributes:
        outputs: f_i without example i, ``[N, C]``.
        nll: Negative log-likelihood of each example, in nats, ``[N]``. Its mean estimates the NLL on new data.
        change: f_i without example i, minus f_i, ``[N, C]``.
    """

    outputs: Tensor
    nll: Tensor
    change: Tensor

    @property
    def sensitivity(self) -> Tensor:
        """Norm of `change`, ``[N]``. It is ‖V_i e_i‖ unless the predictions are corrected."""
        norms: Tensor = torch.linalg.vector_norm(self.change, dim=1)
        return norms


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
        model: The trained architecture. Its own weights are not used.
        posterior: A posterior of any family.
        loader: Batches ``(inputs, targets)`` of the training set, not shuffled and not augmented.
        likelihood: The likelihood of the targets, `Softmax` by default. `Gaussian` and `Bernoulli` need targets shaped
            like the outputs.
        corrected: Whether to remove the example's curvature from Σ too; recommended for linear models only. If I - V H is
            not positive definite, which cannot happen for the exact posterior of a linear model trained on the example, the
            example uses the first form.
        samples: Number of linearised samples that estimate V, useful for many outputs. None computes V exactly by
            C (C + 1)/2 backward passes.

    Returns:
        The predictions.

    Raises:
        DataError: If the loader yields no batch.
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
    device_posterior = posterior.to(device)
    batches = []
    with at_posterior_mean(model, posterior):
        for inputs, targets in loader:
            outputs, covariance = _moments(model, device_posterior, inputs.to(device), samples)
            batches.append(_without_each(outputs, covariance, targets.to(device), likelihood, corrected))
    if not batches:
        raise DataError("The loader yields no batch, so there is no example to leave out. Pass the training data.")
    return LeaveOneOut(*(torch.cat(column).cpu() for column in zip(*batches, strict=True)))


def sensitivity(
    model: nn.Module,
    posterior: AbstractPosterior,
    loader: Iterable[Any],
    likelihood: Likelihood | None = None,
    *,
    samples: int | None = None,
) -> Tensor:
    """Norm of the change in each training example's outputs if the example is removed: residual times predictive variance.

    Examples with a large sensitivity are often mislabelled, rare or hard. See `leave_one_out` for the arguments.

    Returns:
        ‖V_i e_i‖, ``[N]``, in the unit of the outputs.
    """
    return leave_one_out(model, posterior, loader, likelihood, samples=samples).sensitivity


def _moments(
    model: nn.Module, posterior: AbstractPosterior, inputs: Tensor, samples: int | None
) -> tuple[Tensor, Tensor]:
    """f, shaped like the model's output, and V, ``[B, C, C]``."""
    with torch.no_grad():
        mean: Tensor = model(inputs)
        if samples is None:
            return mean, output_covariance(model, posterior, lambda: model(inputs))[1]
        draws = LinearizedSamples(PosteriorSamples(posterior, samples)).outputs(model, lambda: model(inputs))
        deviations = (draws - mean).reshape(samples, len(mean), -1)
    return mean, torch.einsum("sbi,sbj->bij", deviations, deviations) / samples


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
    is_positive = values.amax(1) < 1  # whether I - V H is positive definite
    inverse = 1 / (1 - torch.where(is_positive[:, None], values, 0.0))
    weights = vectors @ (inverse[..., None] * (vectors.mT @ (root.mT @ change[..., None])))
    correction = (left.mT @ weights)[..., 0]
    return change + torch.where(is_positive[:, None], correction, 0.0)
