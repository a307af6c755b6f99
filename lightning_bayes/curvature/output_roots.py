"""Roots of a likelihood's curvature in the outputs: columns v_ic, one backward each, whose outer products add up to it.

    Σ_c v_ic v_icᵀ = H_i        Σ_i Σ_c (J_iᵀ v_ic)(J_iᵀ v_ic)ᵀ = Σ_i J_iᵀ H_i J_i        J_i = ∂f_i/∂θ

    ggn                H_i = -E_{y ~ p(y | f_i)} ∂² log p(y | f_i)/∂f², exactly: C columns for C outputs
    fisher             the same expectation over K labels that the model draws: v_ik = -∂ log p(y_k | f_i)/∂f / √K
    empirical_fisher   the labels of the data: v_i = -∂ log p(y_i | f_i)/∂f, which is another matrix

For the likelihoods of this package the generalised Gauss-Newton matrix is the true Fisher (Martens 2014,
https://arxiv.org/abs/1412.1193), so ``ggn`` is both, and ``fisher`` estimates both without bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Generator, Tensor

from lightning_bayes.curvature.likelihood import Likelihood
from lightning_bayes.errors import HyperparameterError

CurvatureName: TypeAlias = Literal["ggn", "fisher", "empirical_fisher"]
Columns: TypeAlias = Callable[[Tensor], Iterator[Tensor]]  # from outputs, with or without a graph


def check_curvature(curvature: str, mc_samples: int) -> None:
    """Require a curvature that exists.

    Args:
        curvature: Its name.
        mc_samples: Labels drawn for each example.

    Raises:
        HyperparameterError: If it does not, or there is no label to draw.
    """
    if curvature not in get_args(CurvatureName):
        raise HyperparameterError(f"curvature={curvature!r} is unknown; use {', '.join(get_args(CurvatureName))}.")
    if mc_samples < 1:
        raise HyperparameterError(f"mc_samples={mc_samples} must be at least 1.")


def root_columns(
    curvature: CurvatureName, likelihood: Likelihood, targets: Any, mc_samples: int, generator: Generator
) -> Columns:
    """The columns of a batch.

    Args:
        curvature: See the top of this file.
        likelihood: The likelihood of the targets.
        targets: Those of the batch, for ``"empirical_fisher"``.
        mc_samples: K, for ``"fisher"``.
        generator: Source of the labels.

    Returns:
        A function from outputs ``[B, …]`` to the columns, shaped like them.
    """

    def columns(outputs: Tensor) -> Iterator[Tensor]:
        outputs = outputs.detach()
        if curvature == "ggn":
            yield from exact_columns(likelihood, outputs)
        elif curvature == "fisher":
            for _ in range(mc_samples):
                drawn = likelihood.sample(outputs, generator)
                yield _nll_gradient(likelihood, outputs, drawn) / mc_samples**0.5
        else:
            yield _nll_gradient(likelihood, outputs, targets)

    return columns


def exact_columns(likelihood: Likelihood, outputs: Tensor) -> Iterator[Tensor]:
    """The columns of ``"ggn"``, one after the other."""
    for index in range(outputs[0].numel()):
        yield likelihood.root(outputs, index)


def unit_columns(outputs: Tensor) -> Iterator[Tensor]:
    """One output of every example after the other: J_iᵀ e_c is row c of the Jacobian."""
    for index in range(outputs[0].numel()):
        column = torch.zeros_like(outputs)
        column.view(len(outputs), -1)[:, index] = 1
        yield column


def _nll_gradient(likelihood: Likelihood, outputs: Tensor, targets: Any) -> Tensor:
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        return torch.autograd.grad(likelihood.nll(leaf, targets).sum(), leaf)[0]
