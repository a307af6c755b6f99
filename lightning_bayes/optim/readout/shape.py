"""The shape of a parameter's noise, from its parameter group and optimizer state; see `posteriors.shaped_noise`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct, pi_damped
from lightning_bayes.optim.effective import Effective, effective
from lightning_bayes.optim.weight_prior import noise_terms, prior_of
from lightning_bayes.posteriors import (
    Shape,
    noise_damping,
    noise_scale,
    noise_shape,
    tensor_sizes,
)

_OF_DEAD_LAYERS = 1e-8  # γ_t of a matrix without any curvature: large enough for π-damping to make it flat


def shape_of(group: Mapping[str, Any], states: Sequence[Mapping[str, Any]], means: Sequence[Tensor]) -> Shape | None:
    """The shape of the noise of parameters outside of matrices, alike in device and dtype.

    Args:
        group: Their parameter group.
        states: Their optimizer states.
        means: μ of each.

    Returns:
        Ñ/τ_t and γ_t of each, without δ̃ of weights with priors of their own; None where the noise is that of the bound.
    """
    now, curvatures = noise_terms(group, states)
    if now.relative_noise is None:
        return None
    return noise_shape(
        curvatures,
        torch.stack(sizes_of(states, means)),
        now.relative_noise,
        now.scale,
        now.stated_damping,
        now.noise_flatness,
    )


def sizes_of(states: Sequence[Mapping[str, Any]], means: Sequence[Tensor]) -> list[Tensor]:
    """r_t of parameters outside of matrices: after the last measurement, or now where there was none.

    Args:
        states: Their optimizer states.
        means: μ of each.

    Returns:
        A scalar each.
    """
    if all("size" in state for state in states):
        return [state["size"] for state in states]
    return list(tensor_sizes(means, [state["scale"] for state in states]).unbind())


def damping_of(group: Mapping[str, Any], state: Mapping[str, Any], mean: Tensor) -> Tensor | float:
    """γ_t of a parameter, prior included; arguments as in `layer_shape`."""
    if "input_factor" in state:
        return layer_shape(group, state, mean).damping
    shape, own = shape_of(group, [state], [mean]), prior_of(group, state)
    if shape is None:
        return own + effective(group).noise_damping
    return shape.damping[0] + own if "prior_precision" in state else shape.damping[0]


def temperature_of(group: Mapping[str, Any], state: Mapping[str, Any], mean: Tensor) -> Tensor | None:
    """τ_t of a tensor; arguments as in `layer_shape`. None where it has no noise, or none of its own."""
    if not (group["noisy"] and state.get("noisy") and state.get("step")):
        return None
    now = effective(group)
    if "input_factor" in state:
        return now.num_data / layer_shape(group, state, mean).scale
    if "curvature" not in state:
        return None
    shape = shape_of(group, [state], [mean])
    return mean.new_tensor(now.kl_weight) if shape is None else now.num_data / shape.scale[0]


def determined(curvature: Tensor, damping: Tensor | float) -> Tensor:
    """Σ_i s_i / (s_i + γ), negative s_i counted as 0: the number of parameters that the data determine.

    Args:
        curvature: s.
        damping: γ, prior included.

    Returns:
        A scalar.
    """
    positive = curvature.clamp_min(0)
    return (positive / (positive + damping)).sum()


def layer_damping(curvature: KroneckerProduct, now: Effective) -> Tensor | float:
    """γ_t of a layer's matrix, prior included; δ̃ and the damping in the noise where that is the bound's.

    Args:
        curvature: S ⊗ A.
        now: The effective hyperparameters of its group.

    Returns:
        A scalar, for `pi_damped`.
    """
    if now.relative_noise is None:
        return now.prior + now.noise_damping
    mean = curvature.trace().mean() / (curvature.left.shape[-1] * curvature.right.shape[-1])
    found = noise_damping(mean, now.stated_damping, now.noise_flatness)
    return torch.where(mean > 0, found, max(now.stated_damping, _OF_DEAD_LAYERS))


def mean_variance(root: KroneckerProduct) -> Tensor:
    """The mean of diag (R Rᵀ), a scalar, of R = R_S ⊗ R_A."""
    left, right = (factor.square().sum((-2, -1)) / factor.shape[-1] for factor in root)
    return (left * right).mean()


def layer_scale(variance: Tensor, state: Mapping[str, Any], weight: Tensor, now: Effective) -> Tensor | float:
    """Ñ/τ_t of a layer's matrix; Ñ/τ where the noise is that of the bound.

    Args:
        variance: See `mean_variance`, of the root of the inverse of the damped S ⊗ A.
        state: The optimizer state of the layer's weight.
        weight: μ of it.
        now: The effective hyperparameters of its group.

    Returns:
        A scalar.
    """
    if now.relative_noise is None:
        return now.scale
    sizes = tensor_sizes([weight], [state["scale"]])
    return noise_scale(variance, sizes, now.relative_noise, now.scale)[0]


def layer_shape(group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor) -> Shape:
    """The shape of the noise of a layer's matrix, as if its factors were inverted now.

    The precision is (Ñ/τ_t) times the π-damped S ⊗ A, so the mean variance is that of its diagonal.

    Args:
        group: The parameter group of the layer's weight.
        state: Its optimizer state.
        weight: μ.

    Returns:
        Ñ/τ_t and γ_t, scalars.
    """
    now, curvature = effective(group), KroneckerProduct(state["output_factor"], state["input_factor"])
    damping = layer_damping(curvature, now)
    scale: Tensor | float = now.scale
    if now.relative_noise is not None:
        scale = layer_scale(mean_variance(pi_damped(curvature, damping).inverse_root("a layer")), state, weight, now)
    return Shape(*(torch.as_tensor(number, dtype=weight.dtype, device=weight.device) for number in (scale, damping)))
