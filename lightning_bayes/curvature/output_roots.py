"""Square roots of the output curvature of a likelihood: columns v_ic, with one backward pass per column.

    Σ_c v_ic v_icᵀ = H_i        Σ_i Σ_c (J_iᵀ v_ic)(J_iᵀ v_ic)ᵀ = Σ_i J_iᵀ H_i J_i        J_i = ∂f_i/∂θ

    ggn                H_i = -E_{y ~ p(y | f_i)} ∂² log p(y | f_i)/∂f², exactly: C columns for C outputs
    fisher             a Monte Carlo estimate with K labels sampled from the model: v_ik = -∂ log p(y_k | f_i)/∂f / √K
    empirical_fisher   the labels of the data: v_i = -∂ log p(y_i | f_i)/∂f; a different matrix

For the likelihoods of this package the generalised Gauss-Newton matrix equals the true Fisher (Martens 2014,
https://arxiv.org/abs/1412.1193). So ``ggn`` computes both exactly, and ``fisher`` estimates both without bias. Weights
of the loss multiply H_i; a target that does not count has the weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Generator, Tensor

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood import OutputLikelihood

CurvatureName: TypeAlias = Literal["ggn", "fisher", "empirical_fisher"]
Columns: TypeAlias = Callable[[Tensor], Iterator[Tensor]]  # from outputs to columns


def check_curvature(curvature: str, mc_samples: int) -> None:
    """Raise `HyperparameterError` if the curvature is unknown or `mc_samples` is below 1."""
    if curvature not in get_args(CurvatureName):
        raise HyperparameterError(f"curvature={curvature!r} is unknown; use {', '.join(get_args(CurvatureName))}.")
    if mc_samples < 1:
        raise HyperparameterError(f"mc_samples={mc_samples} must be at least 1.")


def root_columns(
    curvature: CurvatureName,
    kind: OutputLikelihood,
    targets: Any,
    mc_samples: int,
    generator: Generator,
    factors: Tensor | None = None,
) -> Columns:
    """Return a function from outputs ``[B, …]`` to columns of the same shape.

    Args:
        curvature: Which matrix.
        kind: The likelihood.
        targets: Labels of the data, for ``"empirical_fisher"`` and for the weights of their classes.
        mc_samples: K.
        generator: Draws the labels of ``"fisher"``.
        factors: What multiplies the loss of each target beside the weight of its class; 0 for targets that do not count.

    Returns:
        The function.
    """

    def columns(outputs: Tensor) -> Iterator[Tensor]:
        outputs = outputs.detach()
        if curvature == "empirical_fisher":
            yield _gradient(lambda leaf: kind.losses(leaf, targets), outputs, factors)
            return
        weights = _product(factors, None if targets is None else kind.weights(outputs, targets))
        if curvature == "fisher":
            root = None if weights is None else weights.sqrt()
            for _ in range(mc_samples):
                labels = kind.sample(outputs, generator)
                yield _gradient(lambda leaf, y=labels: -kind.log_prob(leaf, y), outputs, root) / mc_samples**0.5  # type: ignore[misc]
            return
        scale = None if weights is None else kind.over_outputs(weights.sqrt(), outputs)
        for index in range(outputs[0].numel()):
            column = kind.root(outputs, index)
            yield column if scale is None else scale * column

    return columns


def _product(factors: Tensor | None, weights: Tensor | None) -> Tensor | None:
    if factors is None or weights is None:
        return weights if factors is None else factors
    return factors * weights


def unit_columns(outputs: Tensor) -> Iterator[Tensor]:
    """The unit vectors e_c of the outputs: J_iᵀ e_c is row c of the Jacobian."""
    for index in range(outputs[0].numel()):
        column = outputs.new_zeros(outputs.shape)  # contiguous, also where the outputs are transposed
        column.view(len(outputs), -1)[:, index] = 1
        yield column


def _gradient(losses: Callable[[Tensor], Tensor], outputs: Tensor, factors: Tensor | None) -> Tensor:
    """The gradient of losses times factors."""
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        values = losses(leaf)
        if factors is not None:
            values = values.where(factors != 0, 0.0) * factors.reshape(values.shape)
        return torch.autograd.grad(values.sum(), leaf)[0]
