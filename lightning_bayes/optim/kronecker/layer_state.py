"""The optimizer state of a layer's matrix: named tensors and numbers, so that it moves, saves and loads safely.

It is part of the state of the layer's weight:

    momentum                        m, shaped like the weight; the bias keeps its own part
    output_factor, input_factor     S and A
    output_inverse, input_inverse   S⁻ and A⁻, as of the last inversion
    output_root, input_root         R_S and R_A of the noise, as of the last inversion
    measurements                    number of measurements of the factors
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.posteriors import initial_curvature

State: TypeAlias = dict[str, Any]
_KINDS = ("factor", "inverse", "root")


def product(state: State, kind: str) -> KroneckerProduct | None:
    """One of a layer's products.

    Args:
        state: The state of its weight.
        kind: ``"factor"``, ``"inverse"`` or ``"root"``.

    Returns:
        The product, or None if there is none yet.
    """
    return KroneckerProduct(state[f"output_{kind}"], state[f"input_{kind}"]) if f"output_{kind}" in state else None


def put(state: State, kind: str, value: KroneckerProduct) -> None:
    """Write one of the products; arguments as in `product`."""
    state[f"output_{kind}"], state[f"input_{kind}"] = value


def _keys(kinds: Sequence[str]) -> list[str]:
    return [f"{side}_{kind}" for kind in kinds for side in ("output", "input")]


def drop_if_of_another_shape(state: State, layer: MatrixLayer) -> None:
    """Drop everything that was measured before a bias was frozen, or unfrozen."""
    if "input_factor" in state and state["input_factor"].shape[-1] != layer.shape[-1]:
        for key in _keys(_KINDS):
            state.pop(key, None)
        state["measurements"] = 0


def start_at_precision(state: State, layer: MatrixLayer) -> None:
    """Write factors, multiples of I, whose posterior precision is the group's ``init_precision``.

    π-damping adds a cross term: with S = A = c I the precision is (Ñ/τ)(c + √(δ̃+γ))².

    Args:
        state: The state of the layer's weight.
        layer: The layer.
    """
    now = effective(layer.group)
    start = initial_curvature(layer.group["init_precision"], **now.start_arguments)
    least = now.prior + now.noise_damping
    size = math.sqrt(start + least) - math.sqrt(least)
    groups, *sides = layer.shape
    eyes = [size * torch.eye(side, dtype=layer.weight.dtype, device=layer.weight.device) for side in sides]
    put(state, "factor", KroneckerProduct(*(eye if groups == 1 else eye.repeat(groups, 1, 1) for eye in eyes)))


def sides(state: State, kinds: Sequence[str]) -> list[Tensor]:
    """Both tensors of each of the products `kinds`; see `product`."""
    return [state[key] for key in _keys(kinds)]


def fill(state: State, kinds: Sequence[str], value: float) -> None:
    """Write products shaped like the factors, all of whose entries are `value`; see `product`."""
    for kind in kinds:
        put(state, kind, KroneckerProduct(*(torch.full_like(factor, value) for factor in sides(state, ["factor"]))))


@contextmanager
def kept_on_error(states: Iterable[State]) -> Iterator[None]:
    """Inside, values of `states` may be replaced; after an exception they are what they were.

    Args:
        states: States, whose tensors are replaced and never written to.

    Yields:
        Nothing.
    """
    before = [(state, dict(state)) for state in states]
    try:
        yield
    except BaseException:
        for state, values in before:
            state.clear()
            state.update(values)
        raise


def make_contiguous(state: State, kinds: Sequence[str]) -> None:
    """Give products one memory layout, because another one multiplies to other last bits; see `product`."""
    for key in _keys(kinds):
        state[key] = state[key].contiguous()
