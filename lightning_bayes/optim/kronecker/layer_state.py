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
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.effective import Effective
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.posteriors import initial_curvature

State: TypeAlias = dict[str, Any]
_SIDES = ("output", "input")


def is_noisy(state: State, layer: MatrixLayer) -> bool:
    """Whether the layer is sampled."""
    return bool(layer.group["noisy"] and state["noisy"])


def has_product(state: State, kind: str) -> bool:
    """Whether the product exists; arguments as in `product`."""
    return f"output_{kind}" in state


def product(state: State, kind: str) -> KroneckerProduct:
    """Return a layer's ``"factor"``, ``"inverse"`` or ``"root"`` from the state of its weight."""
    return KroneckerProduct(state[f"output_{kind}"], state[f"input_{kind}"])


def entries(value: KroneckerProduct, *kinds: str) -> dict[str, Tensor]:
    """Return the entries of a state in which the products `kinds` have this value; kinds as in `product`."""
    return {f"{side}_{kind}": factor for kind in kinds for side, factor in zip(_SIDES, value, strict=True)}


def is_of_another_shape(state: State, layer: MatrixLayer) -> bool:
    """Whether the layer's factors predate freezing or unfreezing its bias."""
    return has_product(state, "factor") and state["input_factor"].shape[-1] != layer.shape[-1]


def drop_if_of_another_shape(state: State, layer: MatrixLayer) -> None:
    """Discard the layer's factors if they predate freezing or unfreezing its bias."""
    if is_of_another_shape(state, layer):
        for key in [key for key in state if key.startswith(("output_", "input_"))]:
            del state[key]
        state["measurements"] = 0


def factors_at_precision(layer: MatrixLayer, init_precision: float, hyperparameters: Effective) -> KroneckerProduct:
    """Return factors S = A = c I whose posterior precision is `init_precision`.

    π-damping adds a cross term: the precision is (Ñ/τ)(c + √(δ̃+γ))².
    """
    curvature = initial_curvature(init_precision, **hyperparameters.start_arguments)
    damping = hyperparameters.prior + hyperparameters.noise_damping
    c = math.sqrt(curvature + damping) - math.sqrt(damping)
    eyes = [c * torch.eye(shape[-1]).to(layer.weight) for shape in layer.factor_shapes]
    return KroneckerProduct(*(eye.expand(shape).clone() for eye, shape in zip(eyes, layer.factor_shapes, strict=True)))
