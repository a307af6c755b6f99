"""Layers under K-FAC's pure functions: a step of all of them with one length, as the papers write it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.kronecker import equations
from lightning_bayes.optim.kronecker.moves import clipped_lr, fisher_norm


class Layer(NamedTuple):
    mean: Tensor
    momentum: Tensor
    curvature: KroneckerProduct
    inverse: KroneckerProduct
    root: KroneckerProduct


def start(mean, curvature, *, prior, damping=0.0, noise_damping=0.0, name=""):
    inverse = equations.damped_inverse(curvature, prior + damping, name)
    root = equations.noise_root(curvature, prior + noise_damping, name)
    return Layer(mean, torch.zeros_like(mean), curvature, inverse, root)


def sample_layer(layer, noise, *, num_data, kl_weight=1.0):
    """W = M + √(τ/Ñ) R_S E R_Aᵀ."""
    return layer.mean + (kl_weight / num_data) ** 0.5 * layer.root.upper_matvec(noise)


def take_step(layers, grads, *, lr, beta=0.0, prior=0.0, step=1, kl_clip=None):
    """W ← W - α v of all layers, α from their common Fisher norm."""
    found = [
        equations.update(
            equations.KFACState(layer.mean, layer.momentum, layer.inverse), grad, beta=beta, prior=prior, step=step
        )
        for layer, grad in zip(layers, grads, strict=True)
    ]
    if kl_clip is not None:
        lr = clipped_lr(lr, fisher_norm([f.direction for f in found], [f.corrected for f in found]), kl_clip)
    return [
        layer._replace(mean=layer.mean - lr * f.direction, momentum=f.momentum)
        for layer, f in zip(layers, found, strict=True)
    ]
