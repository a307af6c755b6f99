"""One hidden layer of ReLUs for every split, with its gradients and curvature as batched matrix products.

    z = W₁ x    a = relu(z)    f = w₂ᵀ a        the last entry of x and a is 1, for the bias

With δ₂ = ∂ℓ/∂f per example, the gradient of w₂ is δ₂ a, and that of W₁ is δ₁ x with δ₁ = δ₂ w₂ ∘ 1{z > 0}.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lightning_bayes.linalg import KroneckerProduct


class Weights(NamedTuple):
    """The matrices of both layers, with the bias as last column: ``[..., H, D + 1]`` and ``[..., 1, H + 1]``."""

    hidden: Tensor
    output: Tensor

    def flat(self) -> Tensor:
        """All weights as one vector, ``[..., P]``."""
        return torch.cat([self.hidden.flatten(-2), self.output.flatten(-2)], -1)


def unflatten(flat: Tensor, num_hidden: int, num_inputs: int) -> Weights:
    """The inverse of `Weights.flat`, with H hidden units and D + 1 inputs; returns views."""
    hidden, output = flat.split([num_hidden * num_inputs, num_hidden + 1], -1)
    return Weights(hidden.unflatten(-1, (num_hidden, num_inputs)), output.unsqueeze(-2))


def initial_weights(splits: int, num_inputs: int, num_hidden: int, generator: Generator) -> Weights:
    """Weights ``[R, …]``, uniform within ±1/√fan-in, as torch initialises linear layers."""
    sides = [(num_hidden, num_inputs), (1, num_hidden + 1)]
    return Weights(*((2 * torch.rand(splits, *s, generator=generator) - 1) * (s[1] - 1) ** -0.5 for s in sides))


class Trace(NamedTuple):
    """A forward pass: x ``[R, B, D + 1]``, a ``[..., R, B, H + 1]``, f ``[..., R, B]``."""

    inputs: Tensor
    hidden: Tensor
    outputs: Tensor


def forward(weights: Weights, inputs: Tensor) -> Trace:
    """Run the network with weights ``[..., R, …]`` on inputs ``[R, B, D + 1]``."""
    active = torch.nn.functional.pad((inputs @ weights.hidden.mT).relu_(), (0, 1), value=1.0)
    return Trace(inputs, active, (active @ weights.output.mT)[..., 0])


def hidden_gradients(weights: Weights, trace: Trace, output_gradients: Tensor) -> Tensor:
    """δ₁ ``[..., R, B, H]`` from δ₂ ``[..., R, B]``."""
    return output_gradients[..., None] * weights.output[..., :-1] * (trace.hidden[..., :-1] > 0)


def mean_gradient(weights: Weights, trace: Trace, output_gradients: Tensor) -> Weights:
    """Mean over examples of the gradients."""
    batch = output_gradients.shape[-1]
    back = hidden_gradients(weights, trace, output_gradients)
    return Weights(back.mT @ trace.inputs / batch, output_gradients.unsqueeze(-2) @ trace.hidden / batch)


def mean_square_gradient(weights: Weights, trace: Trace, output_gradients: Tensor) -> Weights:
    """Mean over examples of the squared gradients."""
    batch = output_gradients.shape[-1]
    back = hidden_gradients(weights, trace, output_gradients).square()
    output = output_gradients.square().unsqueeze(-2) @ trace.hidden.square()
    return Weights(back.mT @ trace.inputs.square() / batch, output / batch)


class Blocks(NamedTuple):
    """The blocks S ⊗ A of the curvature for both layers, and the block between them."""

    hidden: KroneckerProduct
    output: KroneckerProduct
    link: KroneckerProduct


def fisher_blocks(weights: Weights, trace: Trace, precision: Tensor) -> Blocks:
    """Kronecker factors of the Fisher, exact over labels: with one output and E[δ₂²] = τ, S = τ mean (∂f/∂z)(∂f/∂z)ᵀ."""
    unit = precision.sqrt()[:, None].expand(trace.outputs.shape)
    back = hidden_gradients(weights, trace, unit)
    return Blocks(
        KroneckerProduct(_moment(back, back), _moment(trace.inputs, trace.inputs)),
        KroneckerProduct(_moment(unit[..., None], unit[..., None]), _moment(trace.hidden, trace.hidden)),
        KroneckerProduct(_moment(back, unit[..., None]), _moment(trace.inputs, trace.hidden)),
    )


def _moment(left: Tensor, right: Tensor) -> Tensor:
    moment = left.mT @ right / left.shape[-2]
    return moment.flatten(0, -4).mean(0) if moment.dim() > 3 else moment
