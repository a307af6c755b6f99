"""The optimizer state of a layer's matrix: tensors and numbers under names, so that it moves, saves and loads safely.

It is the state of the layer's weight:

    momentum                        m, shaped like the weight; the bias keeps its own part
    output_factor, input_factor     S and A
    output_inverse, input_inverse   S⁻ and A⁻, as of the last inversion
    output_root, input_root         R_S and R_A of the noise, as of the last inversion
    measurements                    how often the factors were measured
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.hyperparameters import effective
from lightning_bayes.optim.kronecker import kfac, noisy_kfac
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.posteriors import initial_curvature, layer_noise_damping

State: TypeAlias = dict[str, Any]
_KINDS = ("factor", "inverse", "root")


def get(state: State, kind: str) -> KroneckerProduct | None:
    """One of the products of a layer.

    Args:
        state: The state of its weight.
        kind: ``"factor"``, ``"inverse"`` or ``"root"``.

    Returns:
        The product, or None if there is none yet.
    """
    return KroneckerProduct(state[f"output_{kind}"], state[f"input_{kind}"]) if f"output_{kind}" in state else None


def put(state: State, kind: str, product: KroneckerProduct) -> None:
    """Write one of the products; arguments as in `get`."""
    state[f"output_{kind}"], state[f"input_{kind}"] = product


def _keys(kinds: Sequence[str]) -> list[str]:
    """Where products lie in the state."""
    return [f"{side}_{kind}" for kind in kinds for side in ("output", "input")]


def drop_if_of_another_shape(state: State, layer: MatrixLayer) -> None:
    """Forget what was measured before a bias was frozen, or trained again."""
    if "input_factor" in state and state["input_factor"].shape[-1] != layer.shape[-1]:
        for key in _keys(_KINDS):
            state.pop(key, None)
        state["measurements"] = 0


def take(state: State, measured: KroneckerProduct, weight_of_old: float) -> None:
    """Average new factors in, see `kfac.average_factors`; the first ones are taken as they are.

    Args:
        state: The state of the layer's weight.
        measured: Ŝ ⊗ Â.
        weight_of_old: β₂.
    """
    old = get(state, "factor")
    new = measured
    if old is not None:
        new = kfac.average_factors(old, beta=weight_of_old, output_factor=measured.left, input_factor=measured.right)
    put(state, "factor", new)
    state["measurements"] += 1


def start_at_precision(state: State, layer: MatrixLayer) -> None:
    """Put in factors, multiples of I, whose posterior precision is the group's ``init_precision``.

    π-damping adds a cross term: with S = A = c I the precision is (Ñ/τ)(c + √(δ̃+γ))².

    Args:
        state: The state of the layer's weight.
        layer: The layer.
    """
    now = effective(layer.group)
    start = initial_curvature(layer.group["init_precision"], **now.precision_arguments)
    least = now.prior + now.noise_damping
    size = math.sqrt(start + least) - math.sqrt(least)
    groups, *sides = layer.shape
    eyes = [size * torch.eye(side, dtype=layer.weight.dtype, device=layer.weight.device) for side in sides]
    put(state, "factor", KroneckerProduct(*(eye if groups == 1 else eye.repeat(groups, 1, 1) for eye in eyes)))


def sides(state: State, kinds: Sequence[str]) -> list[Tensor]:
    """Both tensors of each of the products `kinds`; see `get`."""
    return [state[key] for key in _keys(kinds)]


def fill(state: State, kinds: Sequence[str], value: float) -> None:
    """Put products of the shape of the factors in, whose entries are all `value`; see `get`."""
    for kind in kinds:
        put(state, kind, KroneckerProduct(*(torch.full_like(factor, value) for factor in sides(state, ["factor"]))))


def lay_out_by_rows(state: State, kinds: Sequence[str]) -> None:
    """Give products one layout in memory, because another one multiplies to other last bits; see `get`."""
    for key in _keys(kinds):
        state[key] = state[key].contiguous()


def invert(state: State, layer: MatrixLayer, kinds: Sequence[str]) -> None:
    """Refresh products from the factors.

    Args:
        state: The state of the layer's weight.
        layer: The layer.
        kinds: Which: ``"inverse"`` for a step that takes it, ``"root"`` for noise.
    """
    factor = get(state, "factor")
    assert factor is not None
    now = effective(layer.group)
    if "inverse" in kinds:
        put(state, "inverse", kfac.damped_inverse(factor, prior=now.prior, damping=now.damping, name=layer.name))
    if "root" in kinds:
        damping = layer_noise_damping(layer.group, state, layer.weight.detach())
        put(state, "root", noisy_kfac.noise_root(factor, prior=now.prior, damping=damping, name=layer.name))


def move(
    state: State, mean: Tensor, momentum: Tensor, grad: Tensor, *, beta: float, prior: float, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Momentum, debiased momentum and preconditioned step of a layer, see `kfac.direction`.

    Args:
        state: The state of the layer's weight.
        mean: M, relative to the prior's mean.
        momentum: m.
        grad: ĝ.
        beta: β₁.
        prior: δ̃.
        step: Number of this update.

    Returns:
        m, m̂ and v.
    """
    factor, inverse = get(state, "factor"), get(state, "inverse")
    assert factor is not None
    assert inverse is not None
    layer = kfac.KFACState(mean, momentum, factor, inverse)
    return kfac.direction(layer, grad, beta=beta, prior=prior, step=step)


def draw(state: State, mean: Tensor, noise: Tensor, group: dict[str, Any]) -> Tensor:
    """W = M + √(τ/Ñ) R_S E R_Aᵀ, see `noisy_kfac.draw`.

    Args:
        state: The state of the layer's weight.
        mean: M.
        noise: E.
        group: The weight's parameter group.

    Returns:
        W.
    """
    root = get(state, "root")
    assert root is not None
    now = effective(group)
    return noisy_kfac.draw(mean, root, noise, num_data=now.num_data, kl_weight=now.kl_weight)
