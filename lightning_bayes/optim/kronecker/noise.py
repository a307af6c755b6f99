"""Samples of the matrices of layers with Kronecker factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.kronecker import equations, layer_state
from lightning_bayes.optim.kronecker.curvature import KroneckerCurvature
from lightning_bayes.optim.kronecker.layer_noise import POOL_PAIRS, LayerNoise
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.optim.readout.shape import damping_of, effective_parameters, layer_scale
from lightning_bayes.optim.runtime.noise import CounterNoise

if TYPE_CHECKING:
    from lightning_bayes.optim.diagonal.mean_field import MeanFieldOptimizer


@final
class KroneckerNoise:
    """Draws samples of layer matrices; layers without noise or without roots are left out.

    Args:
        optimizer: The optimizer.
        curvature: The layers' curvature.
    """

    def __init__(self, optimizer: MeanFieldOptimizer, curvature: KroneckerCurvature) -> None:
        self._optimizer, self._curvature = optimizer, curvature
        self._noises: dict[nn.Parameter, LayerNoise] = {}  # by the layer's weight

    def sample(
        self, layers: Sequence[MatrixLayer], noise: CounterNoise, buffer: Callable[[Tensor], Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """Draw a sample of every layer.

        Args:
            layers: The layers.
            noise: Noise of the pass.
            buffer: Returns scratch memory for a parameter.

        Returns:
            Samples of the layers' parameters.
        """
        samples: dict[nn.Parameter, Tensor] = {}
        for layer in self._sampled(layers):
            values = [buffer(param) for param in layer.params]
            self._write(layer, noise, values)
            samples.update(zip(layer.params, values, strict=True))
        return samples

    def effective_parameters(self, layers: Sequence[MatrixLayer]) -> Iterator[Tensor]:
        """The effective number of parameters of each layer; see `MeanFieldOptimizer.effective_parameters`."""
        for layer in self._sampled(layers):
            state = self._optimizer.state[layer.weight]
            curvature = layer_state.product(state, "factor")
            yield effective_parameters(curvature.diagonal(), damping_of(layer.group, state, layer.weight.detach()))

    def _sampled(self, layers: Sequence[MatrixLayer]) -> list[MatrixLayer]:
        """The layers with noise whose roots exist already."""
        noisy = [layer for layer in layers if self._curvature.is_noisy(layer)]
        return [layer for layer in noisy if layer_state.has_product(self._optimizer.state[layer.weight], "root")]

    def _write(self, layer: MatrixLayer, noise: CounterNoise, values: list[Tensor]) -> None:
        """Write a sample of a layer's matrix to `values`, which also hold its draws unless they come from a pool."""
        layer_noise, means = self._noise_of(layer), [param.detach() for param in layer.params]
        state, hyperparameters = self._optimizer.state[layer.weight], effective(layer.group)
        scale = layer_scale(layer_noise.mean_variance, state, means[0], hyperparameters)
        # Several samples would evict each other from the memory of the pool.
        pool = noise.next_pool(POOL_PAIRS) if self._optimizer.mc_samples == 1 else None
        if pool is None:
            noise.fill_(values)
            weights = equations.sample(layer.matrix(means), layer_noise.root, layer.matrix(values), num_data=scale)
            torch._foreach_copy_(values, layer.tensors(weights))
            return
        factor = torch.as_tensor(scale, dtype=means[0].dtype, device=means[0].device).rsqrt() * noise.sign
        for value, mean, part in zip(values, means, layer.tensors(layer_noise.draw(pool)), strict=True):
            torch.addcmul(mean, part, factor, out=value)  # `equations.sample`, in one pass over the weights

    def _noise_of(self, layer: MatrixLayer) -> LayerNoise:
        root, noise = layer_state.product(self._optimizer.state[layer.weight], "root"), self._noises.get(layer.weight)
        if noise is None or not noise.is_of(root):
            noise = self._noises[layer.weight] = LayerNoise(root)
        return noise
