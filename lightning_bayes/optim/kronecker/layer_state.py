"""The optimizer state of a layer's matrix: named tensors and numbers, so that it can be moved, saved and loaded safely.

It is part of the state of the layer's weight:

    momentum                        m, shaped like the weight; the bias's part is in the state of the bias
    output_factor, input_factor     S and A
    output_inverse, input_inverse   S⁻ and A⁻ as of the last inversion
    output_root, input_root         R_S and R_A of the noise as of the last inversion
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


def has_product(state: State, kind: str) -> bool:
    """Whether the product exists; arguments as in `product`."""
    return f"output_{kind}" in state


def product(state: State, kind: str) -> KroneckerProduct:
    """Return a layer's ``"factor"``, ``"inverse"`` or ``"root"`` from the state of its weight."""
    return KroneckerProduct(state[f"output_{kind}"], state[f"input_{kind}"])


def put(state: State, kind: str, value: KroneckerProduct) -> None:
    """Store a product; arguments as in `product`."""
    state[f"output_{kind}"], state[f"input_{kind}"] = value


def _keys(kinds: Sequence[str]) -> list[str]:
    return [f"{side}_{kind}" for kind in kinds for side in ("output", "input")]


def is_of_another_shape(state: State, layer: MatrixLayer) -> bool:
    """Whether the layer's factors predate freezing or unfreezing its bias."""
    return has_product(state, "factor") and state["input_factor"].shape[-1] != layer.shape[-1]


def drop_if_of_another_shape(state: State, layer: MatrixLayer) -> None:
    """Discard the layer's factors if they predate freezing or unfreezing its bias."""
    if is_of_another_shape(state, layer):
        for key in _keys(_KINDS):
            state.pop(key, None)
        state["measurements"] = 0


def start_at_precision(state: State, layer: MatrixLayer) -> None:
    """Initialise the factors with S = A = c I so that the posterior precision is the group's ``init_precision``.

    π-damping adds a cross term: the precision is (Ñ/τ)(c + √(δ̃+γ))².
    """
    hyperparameters = effective(layer.group)
    curvature = initial_curvature(layer.group["init_precision"], **hyperparameters.start_arguments)
    damping = hyperparameters.prior + hyperparameters.noise_damping
    c = math.sqrt(curvature + damping) - math.sqrt(damping)
    groups, *sides = layer.shape
    eyes = [c * torch.eye(side, dtype=layer.weight.dtype, device=layer.weight.device) for side in sides]
    put(state, "factor", KroneckerProduct(*(eye if groups == 1 else eye.repeat(groups, 1, 1) for eye in eyes)))


def sides(state: State, kinds: Sequence[str]) -> list[Tensor]:
    """Return both tensors of each product in `kinds`; see `product`."""
    return [state[key] for key in _keys(kinds)]


def fill(state: State, kinds: Sequence[str], value: float) -> None:
    """Store products in which all entries are `value`; see `product`."""
    for kind in kinds:
        put(state, kind, KroneckerProduct(*(torch.full_like(factor, value) for factor in sides(state, ["factor"]))))


@contextmanager
def restored_on_error(states: Iterable[State]) -> Iterator[None]:
    """Context manager that restores `states` after an exception.

    Args:
        states: Optimizer states; their values may be replaced inside the context, but not modified in place.

    Yields:
        None.
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
    """Make products contiguous, because the memory layout affects rounding in matrix products; see `product`."""
    for key in _keys(kinds):
        state[key] = state[key].contiguous()
