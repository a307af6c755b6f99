"""A cost model of distributed steps: arithmetic, bytes and latency.

    step = arithmetic / speed + curvature's share + collective(bytes, ranks)
    collective = 2 (R - 1)/R · bytes / bandwidth + 2 ⌈log₂ R⌉ · latency · buckets

The first term of a collective is the cost of a ring, which is optimal in bytes; the second is the latency of a tree, which
libraries use when latency dominates. Nothing overlaps: the one reduction of a step starts after its backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_bayes.optim.kronecker.arguments import DEFAULT_MAX_SIDE

Method: TypeAlias = Literal["adam", "vogn", "noisy-kfac"]
FLOAT_BYTES = 4
BUCKET_BYTES = 256 * 2**20  # default of BayesDDPStrategy


@dataclass(frozen=True)
class Machine:
    """The assumptions of the model; none of them is measured.

    Args:
        flops: Floating-point operations per second of training on one device.
        matrix_flops: The same for inversions of the factors, which use a device less efficiently.
        bandwidth: Bytes per second and device, in both directions simultaneously.
        latency: Seconds per hop.
        batch: Examples per device and step.
        backward_over_forward: Arithmetic of a backward pass relative to a forward pass.
    """

    flops: float = 40e12
    matrix_flops: float = 4e12
    bandwidth: float = 12.5e9  # 100 Gbit/s
    latency: float = 10e-6
    batch: int = 32
    backward_over_forward: float = 2.0


@dataclass(frozen=True)
class Intervals:
    """Updates per measurement of the factors and per inversion, as in `NoisyKFACCallback()`."""

    stats: int = 20
    inverse: int = 200


@dataclass(frozen=True)
class Network:
    """The properties of a network that the model needs.

    Args:
        parameters: Number of parameters.
        buffers: Number of floating-point values in buffers, such as BatchNorm's statistics.
        sides: Sides of the two Kronecker factors of every linear or convolutional layer with factors.
        rest: Number of parameters in other layers, with a diagonal curvature.
        forward_flops: Operations of the forward pass per example.
        factor_flops: Operations for both factors of all layers per example.
    """

    parameters: int
    buffers: int
    sides: tuple[tuple[int, int], ...]
    rest: int
    forward_flops: float
    factor_flops: float


def describe(model: nn.Module, shape: tuple[int, ...], max_side: int = DEFAULT_MAX_SIDE) -> Network:
    """Describe a network on the meta device; layers with a side above `max_side` have no factors."""
    candidates = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    layers = [layer for layer in candidates if max(_rows(layer), _columns(layer)) <= max_side]
    positions: dict[nn.Module, int] = {}
    handles = [
        layer.register_forward_hook(lambda m, x, y: positions.update({m: y[0].numel() // _rows(m)})) for layer in layers
    ]
    with FlopCounterMode(display=False) as counter:
        model.eval()(torch.empty(1, *shape, device="meta"))
    for handle in handles:
        handle.remove()
    sides = tuple((_rows(layer), _columns(layer)) for layer in layers)
    parameters = sum(p.numel() for p in model.parameters())
    in_layers = sum(p.numel() for layer in layers for p in layer.parameters())
    return Network(
        parameters=parameters,
        buffers=sum(b.numel() for b in model.buffers() if b.is_floating_point()),
        sides=sides,
        rest=parameters - in_layers,
        forward_flops=float(counter.get_total_flops()),
        factor_flops=sum(2.0 * positions[m] * (r * r + c * c) for m, (r, c) in zip(layers, sides, strict=True)),
    )


def _rows(layer: nn.Module) -> int:
    return int(layer.weight.shape[0])  # type: ignore[union-attr, operator, index]


def _columns(layer: nn.Module) -> int:
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    return weight[0].numel() + (layer.bias is not None)


def reduced_bytes(network: Network, method: Method, measures: bool = True) -> int:
    """Bytes that a rank contributes to the reduction of a step.

    Args:
        network: The network.
        method: ``"adam"``: the gradient. ``"vogn"``: ĝ, ĥ, buffers, and three scalars (the loss, the rank's weight, and
            whether it received SIGTERM). ``"noisy-kfac"``: ĝ, ĥ of parameters without factors, buffers, the three scalars,
            and, if it measures, both factors of every layer.
        measures: Whether K-FAC measures in this step.

    Returns:
        The bytes.
    """
    if method == "adam":
        return FLOAT_BYTES * network.parameters
    common = network.parameters + network.buffers + 3
    if method == "vogn":
        return FLOAT_BYTES * (common + network.parameters)
    factors = network.rest + sum(r * r + c * c for r, c in network.sides)
    return FLOAT_BYTES * (common + (factors if measures else 0))


def collective_seconds(size: float, ranks: int, machine: Machine) -> float:
    """Seconds of one all-reduce.

    Args:
        size: Bytes.
        ranks: Number of ranks.
        machine: The machine.

    Returns:
        The seconds; 0 for one rank.

    Example:
        >>> collective_seconds(12.5e9, 2, Machine(latency=0.0))  # each rank sends half of its bytes twice
        1.0
    """
    if ranks == 1:
        return 0.0
    hops = 2 * math.ceil(math.log2(ranks)) * math.ceil(size / BUCKET_BYTES)
    return 2 * (ranks - 1) / ranks * size / machine.bandwidth + hops * machine.latency


def arithmetic_seconds(network: Network, method: Method, ratio: float, machine: Machine, every: Intervals) -> float:
    """Mean seconds of a step on one device.

    Args:
        network: The network.
        method: The method.
        ratio: Step of VOGN relative to Adam, measured in one process.
        machine: The machine.
        every: Intervals of K-FAC. Layers take turns; a layer whose turn comes alone is inverted by every rank.

    Returns:
        The seconds.
    """
    plain = machine.batch * network.forward_flops * (1 + machine.backward_over_forward) / machine.flops
    if method == "adam":
        return plain
    if method == "vogn":
        return plain * ratio
    inversions = sum(2.0 * (r**3 + c**3) for r, c in network.sides) / machine.matrix_flops
    return plain + machine.batch * network.factor_flops / machine.flops / every.stats + inversions / every.inverse


def step_seconds(
    network: Network, method: Method, ranks: int, ratio: float, machine: Machine, every: Intervals
) -> tuple[float, float]:
    """Mean seconds of arithmetic and communication per step.

    Args:
        network: The network.
        method: The method.
        ranks: Number of ranks, each with its own batch.
        ratio: Step of VOGN relative to Adam.
        machine: The machine.
        every: Intervals of K-FAC.

    Returns:
        Seconds of arithmetic, and of communication.
    """
    measured = 1 / every.stats if method == "noisy-kfac" else 1.0
    with_factors = collective_seconds(reduced_bytes(network, method), ranks, machine)
    without_factors = collective_seconds(reduced_bytes(network, method, measures=False), ranks, machine)
    return arithmetic_seconds(network, method, ratio, machine, every), measured * with_factors + (
        1 - measured
    ) * without_factors
