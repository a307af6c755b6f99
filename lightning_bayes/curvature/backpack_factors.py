"""BackPACK's `KFAC`, `KFLR` and `KFRA` as a source of Kronecker factors.

BackPACK (Dangel et al. 2020, https://arxiv.org/abs/1912.10985) computes S' of linear layers and of convolutions without
groups; `curvature.factors` relates it to S, and Ā is this package's. BackPACK propagates the curvature from the
loss back to each layer, so it must support every operation in between. For KFAC and KFLR, `_PassThrough` propagates it
through unsupported operations by vector-Jacobian products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from backpack import backpack, extensions
from backpack.extensions.module_extension import ModuleExtension
from torch import Tensor, nn

from lightning_bayes.curvature.backpack import watched
from lightning_bayes.curvature.backpack_modules import CREATED, AsModules, is_stock, seed_labels
from lightning_bayes.curvature.factors import FactorMoments, LayerRecords, Request, Scales, input_factor
from lightning_bayes.curvature.measured_modules import MeasuredModule, find_measured_modules, refuse
from lightning_bayes.curvature.measurement import KroneckerFactors, KroneckerQuantity
from lightning_bayes.curvature.private_backpack import layer_extension
from lightning_bayes.curvature.rules import rule_for
from lightning_bayes.curvature.rules.batch_norm import uses_batch_statistics
from lightning_bayes.curvature.rules.registry import computes
from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.private_torch import BatchNormBase

_WITH_FACTORS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PASSABLE = (
    *_WITH_FACTORS,
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm),
    *(nn.Embedding, nn.PReLU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Softplus),
)
_OTHERWISE = "use engine='fused'"
_ADVICE = "Use engine='fused', or freeze the layer with requires_grad_(False)."


@final
class _KFLR(extensions.KFLR):  # type: ignore[misc]  # BackPACK ships no types
    """KFLR with support for branches: columns of a square root of the Hessian add over paths, as in KFAC."""

    def accumulate_backpropagated_quantities(self, existing: Tensor, other: Tensor) -> Tensor:
        """The sum of both paths' columns."""
        return existing + other


_EXTENSIONS = {"kflr": _KFLR, "kfra": extensions.KFRA}


def has_backpack_factors(layer: nn.Module) -> bool:
    """Whether BackPACK has factors for `layer`: a linear layer, or a convolution without groups and with zero padding."""
    return type(layer) in _WITH_FACTORS and is_stock(layer) and getattr(layer, "groups", 1) == 1


class _CallStatistics(NamedTuple):
    """Statistics of a layer's call that BackPACK does not report."""

    positions: int  # T
    inputs: Tensor  # Ā, whose bias BackPACK leaves out


@final
class BackpackFactors(LayerRecords):
    """Factors from BackPACK for the layers that it supports, and from `FactorMoments` for other requested layers."""

    def __init__(self, request: Request, workspace: Workspace, quantity: KroneckerQuantity) -> None:
        super().__init__(request, workspace)
        if request.loss_scale != 1:
            raise UnsupportedTrainingError(
                f"BackPACK's {quantity} does not support a scaled loss (torch.amp.GradScaler, precision='16-mixed'). Use "
                "precision='32-true' or engine='fused'."
            )
        self.quantity = quantity
        self._moments = FactorMoments(request, workspace)
        self._by_backpack = {layer for layer in request.layers if has_backpack_factors(layer)}
        self._values: dict[nn.Parameter, list[Tensor]] = {}
        self._as_modules = AsModules(quantity, _OTHERWISE)

    def add(self, layer: nn.Module, x: Tensor, grad_output: Tensor, is_first: bool = True) -> None:
        """Record the statistics of a call that BackPACK does not report; see `LayerRecords.add`."""
        if layer not in self._by_backpack:
            self._moments.add(layer, x, grad_output, is_first)
            return
        inputs = input_factor(layer, x, bias=self.request.layers[layer], workspace=self.workspace)
        self._by_layer[layer] = _CallStatistics(grad_output.shape[2:].numel(), inputs)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Attach BackPACK's hooks for the passes inside; see `LayerRecords.watching`."""
        units = find_measured_modules(model)
        extension = self._extension()
        layers, passing = self._split_modules(model)
        self._check(units, layers, passing)
        _add_pass_through(extension, passing, self._as_modules)
        with watched(model, [*layers, *passing], extension, self._as_modules, _OTHERWISE) as self._values:
            yield

    def observe(self, loss: Tensor, divided_by_host: bool) -> None:
        """Require a loss that BackPACK supports; see `LayerRecords.observe`."""
        self._as_modules.require_loss(loss, divided_by_host)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Disable BackPACK's hooks for the backward of sampled labels; see `LayerRecords.sampling`."""
        with backpack(retain_graph=True), self._as_modules.paused():
            yield

    def results(self, scales: Scales) -> dict[nn.Module, KroneckerFactors]:
        """(S, Ā) of each layer, as means over examples; see `FactorMoments.results`."""
        factors = self._moments.results(scales)
        for layer, statistics in self._by_layer.items():
            factors[layer] = self._factors(layer, statistics, scales.gradient)
        return factors

    def _factors(self, layer: nn.Module, statistics: _CallStatistics, loss_scale: float) -> KroneckerFactors:
        values = next(values for param, values in self._values.items() if param is layer.weight or param is layer.bias)
        return KroneckerFactors((values[0].contiguous() * (loss_scale / statistics.positions), statistics.inputs))

    def _extension(self) -> Any:
        if self.quantity != "kfac":
            return _EXTENSIONS[self.quantity]()
        extension = extensions.KFAC(self.request.mc_samples)
        seed_labels(extension, self.request.mc_samples, self.request.seed)
        return extension

    def _split_modules(self, model: nn.Module) -> tuple[list[MeasuredModule], list[MeasuredModule]]:
        """The layers that BackPACK handles, and the layers that propagate curvature by vector-Jacobian products."""
        layers, passing = [], []
        for name, module in model.named_modules():
            unit = MeasuredModule(name, module, rule_for(module))
            is_trained = any(param.requires_grad for param in module.parameters(recurse=False))
            if has_backpack_factors(module) and (module in self._by_backpack or not is_trained):
                layers.append(unit)
            elif type(module) in _PASSABLE and computes(module, type(module).forward):
                passing.append(unit)
        return layers, passing

    def _check(self, units: list[MeasuredModule], layers: list[MeasuredModule], passing: list[MeasuredModule]) -> None:
        handled = {unit.module for unit in (*layers, *passing)}
        unknown = [unit.label for unit in units if unit.module not in handled]
        stopped = [unit.label for unit in passing if not _passes(unit.module, self.quantity)]
        refuse(
            [
                (f"BackPACK's {self.quantity} cannot pass through ", unknown),
                (f"BackPACK's {self.quantity} does not pass through ", stopped),
            ],
            _ADVICE if self.quantity == "kfac" else f"Use factors='kfac', which supports more layers. {_ADVICE}",
        )


def _passes(module: nn.Module, quantity: KroneckerQuantity) -> bool:
    """Whether curvature passes through a module. KFRA has no vector-Jacobian products; KFLR needs separate examples."""
    return quantity == "kfac" or (quantity == "kflr" and not uses_batch_statistics(module))


def _add_pass_through(extension: Any, passing: list[MeasuredModule], as_modules: AsModules) -> None:
    """Register `_PassThrough` in `extension` for the modules in `passing` and for the modules that `AsModules` creates."""
    modules = {unit.module for unit in passing}
    for kind in {*CREATED, *map(type, modules)}:
        pass_through = _PassThrough(as_modules, layer_extension(extension, kind), modules)
        extension.set_module_extension(kind, pass_through, overwrite=True)


@final
class _PassThrough(ModuleExtension):  # type: ignore[misc]  # BackPACK ships no types
    """Propagates columns through a module by vector-Jacobian products, without measuring its parameters."""

    def __init__(self, as_modules: AsModules, original: ModuleExtension | None, passing: set[nn.Module]) -> None:
        super().__init__()
        self.as_modules, self.original, self.passing = as_modules, original, passing

    def __call__(self, extension: Any, module: nn.Module, g_inp: Any, g_out: Any) -> None:
        if self.original is None or module in self.passing:
            super().__call__(extension, module, g_inp, g_out)
        else:
            self.original(extension, module, g_inp, g_out)

    def backpropagate(self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Tensor) -> Tensor:
        """Map columns ``[V, N, *out]`` at the output to ``[V, N, *in]`` at the input."""
        if isinstance(extension, extensions.KFRA):
            raise NotImplementedError(f"kfra has no rule for {type(module).__name__}")
        with self.as_modules.paused(), torch.enable_grad():
            x = module.input0.detach().requires_grad_()
            output = _recomputed(module, x)
        parts = [torch.autograd.grad(output, x, column, retain_graph=True)[0] for column in columns]
        return torch.stack(parts)


def _recomputed(module: Any, x: Tensor) -> Tensor:
    """The module's output, without an update of BatchNorm's running statistics."""
    if isinstance(module, BatchNormBase):
        on_batch = uses_batch_statistics(module)
        mean, var = (None, None) if on_batch else (module.running_mean, module.running_var)
        return F.batch_norm(x, mean, var, module.weight, module.bias, on_batch, 0.0, module.eps)
    output: Tensor = type(module).forward(module, x)
    return output
