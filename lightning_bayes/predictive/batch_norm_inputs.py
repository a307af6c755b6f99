"""The mean inputs of layers before BatchNorm, which tell its running means under weight samples; see `ScaledPosterior`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.posteriors.scaled import InputMeans
from lightning_bayes.predictive.recalibration import running_statistics
from lightning_bayes.private_torch import conv_helper

_LAYERS: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def centred_means(model: nn.Module) -> set[str]:
    """The names of the running means of BatchNorm layers in training mode, which subtract the mean of their batch."""
    layers = {f"{name}.running_mean": module for name, module in model.named_modules()}
    return {name for name in running_statistics(model) if name in layers and layers[name].training}


class _Inputs:
    """Sums E x of the layers whose outputs enter a BatchNorm layer, over batches."""

    def __init__(self) -> None:
        self.before: dict[str, set[str]] = defaultdict(set)  # names of layers, by that of their BatchNorm layer
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = defaultdict(int)  # of calls
        self.num_batches = 0
        self._outputs: dict[int, tuple[str, Tensor]] = {}

    def note_layer(self, name: str, module: Any, args: Any, output: Tensor) -> None:
        """Keep an output of a linear layer until the end of the batch, and add E x."""
        self._outputs[id(output)] = name, output
        mean = _mean_inputs(module, args[0].detach())
        self.sums[name] = self.sums[name] + mean if name in self.sums else mean
        self.counts[name] += 1

    def note_norm(self, name: str, module: Any, args: Any) -> None:
        """Note the layer whose output a BatchNorm layer gets; empty if it is no layer's."""
        self.before[name].add(self._outputs.get(id(args[0]), ("", args[0]))[0])

    def end_batch(self) -> None:
        """Forget the outputs."""
        self._outputs.clear()
        self.num_batches += 1


@torch.no_grad()
def input_means(model: nn.Module, runs: Iterable[Callable[[], object]], weights: Iterable[str]) -> InputMeans:
    """E x of linear layers with sampled `weights` whose one output enters BatchNorm, from `runs` of batches at the mean."""
    found, names = _Inputs(), running_statistics(model).keys()
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, _LAYERS):
                hooks.callback(module.register_forward_hook(partial(found.note_layer, name)).remove)
            elif f"{name}.running_mean" in names:
                hooks.callback(module.register_forward_pre_hook(partial(found.note_norm, name)).remove)
        for run in runs:
            run()
            found.end_batch()
    pairs = {norm: layer for norm, (layer, *others) in found.before.items() if not others}
    once = {layer for layer, count in found.counts.items() if count == found.num_batches}
    sampled = set(weights)
    return {
        f"{norm}.running_mean": (f"{layer}.weight", found.sums[layer] / found.num_batches)
        for norm, layer in pairs.items()
        if layer in once and f"{layer}.weight" in sampled
    }


def _mean_inputs(module: Any, x: Tensor) -> Tensor:
    """E x of one batch, ``[groups, *inputs]``: the gradient of the mean output of a group's first unit."""
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        weight = module.weight.detach().requires_grad_()
        x = x.to(weight.dtype)
        is_linear = isinstance(module, nn.Linear)
        z = F.linear(x, weight) if is_linear else conv_helper(type(module))(module, x, weight, None)
        dims = [dim for dim in range(z.dim()) if dim != (z.dim() - 1 if is_linear else 1)]
        (gradient,) = torch.autograd.grad(z.mean(dims).sum(), weight)
    groups = 1 if is_linear else module.groups
    inputs: Tensor = gradient[:: len(gradient) // groups]
    return inputs
