"""Square roots of the output curvature of a likelihood: columns v_ic, with one backward pass per column.

    Σ_c v_ic v_icᵀ = H_i        Σ_i Σ_c (J_iᵀ v_ic)(J_iᵀ v_ic)ᵀ = Σ_i J_iᵀ H_i J_i        J_i = ∂f_i/∂θ

    ggn                H_i = -E_{y ~ p(y | f_i)} ∂² log p(y | f_i)/∂f², exactly: C columns for C outputs
    fisher             a Monte Carlo estimate with K labels sampled from the model: v_ik = -∂ log p(y_k | f_i)/∂f / √K
    empirical_fisher   the labels of the data: v_i = -∂ log p(y_i | f_i)/∂f; a different matrix

For the likelihoods of this package the generalised Gauss-Newton matrix equals the true Fisher (Martens 2014,
https://arxiv.org/abs/1412.1193). So ``ggn`` computes both exactly, and ``fisher`` estimates both without bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Generator, Tensor

from lightning_bayes.curvature.likelihood import Likelihood
from lightning_bayes.errors import HyperparameterError

CurvatureName: TypeAlias = Literal["ggn", "fisher", "empirical_fisher"]
Columns: TypeAlias = Callable[[Tensor], Iterator[Tensor]]  # from outputs to columns


def check_curvature(curvature: str, mc_samples: int) -> None:
    """Raise `HyperparameterError` if the curvature is unknown or `mc_samples` is below 1."""
    if curvature not in get_args(CurvatureName):
        raise HyperparameterError(f"curvature={curvature!r} is unknown; use {', '.join(get_args(CurvatureName))}.")
    if mc_samples < 1:
        raise HyperparameterError(f"mc_samples={mc_samples} must be at least 1.")


def root_columns(
    curvature: CurvatureName, likelihood: Likelihood, targets: Any, mc_samples: int, generator: Generator
) -> Columns:
    """Return a function from outputs ``[B, …]`` to columns of the same shape. Only ``"empirical_fisher"`` uses `targets`."""

    def columns(outputs: Tensor) -> Iterator[Tensor]:
        outputs = outputs.detach()
        if curvature == "ggn":
            yield from exact_columns(likelihood, outputs)
        elif curvature == "fisher":
            for _ in range(mc_samples):
                labels = likelihood.sample(outputs, generator)
                yield _nll_gradient(likelihood, outputs, labels) / mc_samples**0.5
        else:
            yield _nll_gradient(likelihood, outputs, targets)

    return columns


def exact_columns(likelihood: Likelihood, outputs: Tensor) -> Iterator[Tensor]:
    """The columns of ``"ggn"``."""
    for index in range(outputs[0].numel()):
        yield likelihood.root(outputs, index)


def unit_columns(outputs: Tensor) -> Iterator[Tensor]:
    """The unit vectors e_c of the outputs: J_iᵀ e_c is row c of the Jacobian."""
    for index in range(outputs[0].numel()):
        column = outputs.new_zeros(outputs.shape)  # contiguous, also where the outputs are transposed
        column.view(len(outputs), -1)[:, index] = 1
        yield column


def _nll_gradient(likelihood: Likelihood, outputs: Tensor, targets: Any) -> Tensor:
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        return torch.autograd.grad(likelihood.nll(leaf, targets).sum(), leaf)[0]
