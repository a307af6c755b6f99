"""BackPACK as the second provider: per-example squares, second-order diagonals, and Kronecker factors.

BackPACK (Dangel et al. 2020, https://arxiv.org/abs/1912.10985) computes them by one *module extension* per layer type.
`BackpackEngine` calls those of `BatchGrad` as the rules of their layers. This package's rules measure the layers that
BackPACK does not have, or whose options it silently ignores: BatchNorm in training mode, LayerNorm, GroupNorm, other
padding modes of convolutions, and embeddings, where BackPACK loops over the table in the default dtype.

`SecondOrderEngine` and `BackpackFactors` propagate curvature from the loss back to each layer, by BackPACK's own hooks. So
BackPACK must support every operation in between, as a module (`backpack_modules`). The factors S' of linear layers and of
convolutions without groups are BackPACK's; `curvature.factors` relates them to S, and Ā is this package's. KFAC and KFLR
pass through unsupported operations by vector-Jacobian products.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, final

import torch
import torch.nn.functional as F
from backpack import backpack, extensions
from backpack.extensions.module_extension import ModuleExtension
from torch import Tensor, nn

from lightning_bayes.curvature.backpack_modules import CREATED, STOCK_LAYERS, AsModules, is_stock, seed_labels, watched
from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.factors import FactorMoments, LayerRecords, Request, Scales, input_factor
from lightning_bayes.curvature.fused import FusedCapture, HookedEngine
from lightning_bayes.curvature.hooks import HookedCapture
from lightning_bayes.curvature.layer_calls import LayerCall
from lightning_bayes.curvature.layouts import ROWS, LayerOutput
from lightning_bayes.curvature.loss import LossReduction, refuse_losses
from lightning_bayes.curvature.measured_modules import MeasuredModule, find_measured_modules, refuse, tied_parameters
from lightning_bayes.curvature.measurement import KroneckerFactors, KroneckerQuantity, SecondOrderDiagonal
from lightning_bayes.curvature.private_backpack import layer_extension, supported_layers
from lightning_bayes.curvature.rules import LayerRule, rule_for
from lightning_bayes.curvature.rules.batch_norm import uses_batch_statistics
from lightning_bayes.curvature.rules.random_numbers import new_seed
from lightning_bayes.curvature.rules.registry import Inputs, PerExample, computes
from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.errors import ExampleDimensionError, UnsupportedTrainingError
from lightning_bayes.private_torch import BatchNormBase

_GRADIENTS = extensions.BatchGrad()
_OTHERWISE = "avoid BackPACK: 'squared_gradients' in measure, VOGN, or hessian='reparameterised' in VONCallback"
_WITH_FACTORS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PASSABLE = (
    *(*STOCK_LAYERS, nn.GroupNorm, nn.LayerNorm),
    *(nn.PReLU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Softplus),
)


@final
class BackpackEngine(HookedEngine):
    """Measures per-example squared gradients by BackPACK's rules. Arguments as in `AbstractEngine`."""

    def capture(self, *, left_out: Collection[nn.Parameter] = ()) -> AbstractContextManager[Capture]:
        """Measure the passes inside the context."""
        return self.run(FusedCapture(self, left_out))

    @staticmethod
    def find_units(model: nn.Module, **options: Any) -> list[MeasuredModule]:
        """The measured modules, with BackPACK's rule where it has one."""
        units = find_measured_modules(model, **options)
        return [unit if unit.rule is None else replace(unit, rule=_rule(unit, unit.rule)) for unit in units]


def _rule(unit: MeasuredModule, own: LayerRule) -> LayerRule:
    """BackPACK's rule for a layer if it has one, else this package's rule."""
    if not is_stock(unit.module) or isinstance(unit.module, nn.Embedding) or uses_batch_statistics(unit.module):
        return own
    return replace(own, contributions=_contributions, _fast_squares=None, _fast_sums=None)


def _contributions(layer: nn.Module, inputs: Inputs, grad_output: Tensor) -> PerExample:
    """c_i of each parameter by BackPACK, which reads the call from attributes of its layer."""
    of_layer, stand_in = layer_extension(_GRADIENTS, type(layer)), copy(layer)
    delta = grad_output.clone()  # results may be views of it, and their callers overwrite them
    vars(stand_in).update(input0=inputs[0], output=delta)  # of the output, only the shape
    names = [name for name, param in layer.named_parameters() if param.requires_grad]
    return {name: getattr(of_layer, name)(_GRADIENTS, stand_in, (), (delta,), None) for name in names}


@final
class SecondOrderEngine(HookedEngine):
    """Measures one of BackPACK's second-order diagonals."""

    def __init__(
        self,
        model: nn.Module,
        quantity: SecondOrderDiagonal,
        loss_reduction: LossReduction = "auto",
        mc_samples: int = 1,
        seed: int | None = None,
    ) -> None:
        super().__init__(model, loss_reduction)
        self.quantity, self.mc_samples, self.seed = quantity, mc_samples, seed

    @contextmanager
    def capture(self, *, left_out: Collection[nn.Parameter] = ()) -> Iterator[Capture]:
        """Measure one pass inside the context; call the capture's `observe` before backward."""
        extension = _extension(self.quantity, self.mc_samples, self.seed)
        kinds = supported_layers(extension)
        # Frozen layers, too. If one that curvature has to pass through is missing, the check of the next layer fails.
        modules = [MeasuredModule(name, module, rule_for(module)) for name, module in self.model.named_modules()]
        layers = self._measured(unit for unit in modules if type(unit.module) in kinds and is_stock(unit.module))
        captured = BackpackCapture(self, AsModules(self.quantity, _OTHERWISE), left_out)
        hooks = watched(self.model, layers, extension, captured.as_modules)
        with self.run(captured), hooks as captured.squares:
            yield captured

    def _measured(self, known: Iterable[MeasuredModule]) -> list[MeasuredModule]:
        """The known layers that BackPACK measures correctly; refuse measured modules that are not among them."""
        layers, units = list(known), find_measured_modules(self.model)
        supported = {layer.module for layer in layers}
        unsupported = [unit.label for unit in units if unit.module not in supported]
        on_batch = [unit.label for unit in units if uses_batch_statistics(unit.module)]
        reasons = {
            f"BackPACK has no rule of {self.quantity} for ": unsupported,
            f"BackPACK has no {self.quantity} of BatchNorm in training mode: ": on_batch,
            "BackPACK would overwrite the curvature of tied parameters: ": tied_parameters(units),
        }
        refuse(reasons.items(), f"Replace the layer, freeze it with requires_grad_(False), or {_OTHERWISE}.")
        return [layer for layer in layers if not uses_batch_statistics(layer.module)]


@final
class BackpackCapture(HookedCapture):
    """A capture filled by one of BackPACK's second-order quantities."""

    measure_losses = refuse_losses

    def __init__(self, engine: HookedEngine, as_modules: AsModules, left_out: Collection[nn.Parameter]) -> None:
        super().__init__(engine, left_out)
        self.as_modules = as_modules

    def observe(self, loss: Tensor, divided_by_host: bool = False) -> None:
        """Require also a loss that BackPACK supports."""
        super().observe(loss, divided_by_host)
        self.as_modules.require_loss(loss, divided_by_host)

    def mean_curvature(self) -> dict[nn.Parameter, Tensor]:
        """The mean of the measured quantity."""
        return self.scaled_squares(self.gradient_factor)  # BackPACK's values scale with the loss, like the gradient

    def handle_call(self, call: LayerCall, inputs: list[Any], grads: list[Tensor | None]) -> bool:
        """Leave every call to BackPACK, apart from the check."""
        return True

    def handle_layouts(self, loss: Tensor, outputs: Sequence[LayerOutput]) -> None:
        """Refuse layouts that BackPACK cannot measure, and check the calls."""
        for output in outputs:
            if output.layout != ROWS:
                raise ExampleDimensionError(
                    f"{output.unit.label} does not hold the {self.layouts.num_examples} examples of the batch in the rows "
                    "of dimension 0. Keep them there, freeze the layer, or measure squared gradients, which support it."
                )
        super().handle_layouts(loss, outputs)


@final
class _KFLR(extensions.KFLR):  # type: ignore[misc]  # BackPACK ships no types
    """KFLR with support for branches: columns of a square root of the Hessian add over paths, as in KFAC."""

    def accumulate_backpropagated_quantities(self, existing: Tensor, other: Tensor) -> Tensor:
        """The sum of both paths' columns."""
        return existing + other


_EXACT: dict[str, Callable[[], Any]] = {
    **{"diag_ggn": extensions.DiagGGNExact, "diag_hessian": extensions.DiagHessian},
    **{"kflr": _KFLR, "kfra": extensions.KFRA},
}


def _extension(quantity: str, mc_samples: int, seed: int | None) -> Any:
    """BackPACK's extension that measures a quantity, from labels under the seed if it samples them."""
    if quantity in _EXACT:
        return _EXACT[quantity]()
    extension = (extensions.KFAC if quantity == "kfac" else extensions.DiagGGNMC)(mc_samples)
    seed_labels(extension, mc_samples, new_seed() if seed is None else seed)
    return extension


def has_backpack_factors(layer: nn.Module) -> bool:
    """Whether BackPACK has factors for `layer`: a linear layer, or a convolution without groups and with zero padding."""
    return type(layer) in _WITH_FACTORS and is_stock(layer) and getattr(layer, "groups", 1) == 1


@final
class BackpackFactors(LayerRecords):
    """Factors from BackPACK for the layers that it supports, and from `FactorMoments` for other requested layers."""

    def __init__(self, request: Request, workspace: Workspace, quantity: KroneckerQuantity) -> None:
        super().__init__(request, workspace)
        if request.loss_scale != 1:
            raise UnsupportedTrainingError(f"BackPACK's {quantity} does not support a scaled loss. Use engine='fused'.")
        self.quantity = quantity
        self._moments = FactorMoments(request, workspace)
        self._by_backpack = {layer for layer in request.layers if has_backpack_factors(layer)}
        self._values: dict[nn.Parameter, list[Tensor]] = {}
        self._as_modules = AsModules(quantity, "use engine='fused'")

    def add(self, layer: nn.Module, x: Tensor, grad_output: Tensor, is_first: bool = True) -> None:
        """Record what BackPACK does not report of a call, T and Ā with its bias."""
        if layer not in self._by_backpack:
            self._moments.add(layer, x, grad_output, is_first)
            return
        inputs = input_factor(layer, x, bias=self.request.layers[layer], workspace=self.workspace)
        self._by_layer[layer] = grad_output.shape[2:].numel(), inputs

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Attach BackPACK's hooks for the passes inside."""
        extension = _extension(self.quantity, self.request.mc_samples, self.request.seed)
        layers, passing = self._split_modules(model)
        self._check(find_measured_modules(model), layers, passing)
        modules = {unit.module for unit in passing}
        for kind in () if self.quantity == "kfra" else {*CREATED, *map(type, modules)}:  # KFRA propagates no columns
            pass_through = _PassThrough(self._as_modules, layer_extension(extension, kind), modules)
            extension.set_module_extension(kind, pass_through, overwrite=True)
        with watched(model, [*layers, *passing], extension, self._as_modules) as self._values:
            yield

    def observe(self, loss: Tensor, divided_by_host: bool) -> None:
        """Require a loss that BackPACK supports."""
        self._as_modules.require_loss(loss, divided_by_host)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Disable BackPACK's hooks for the backward of sampled labels."""
        with backpack(retain_graph=True), self._as_modules.paused():
            yield

    def results(self, scales: Scales) -> dict[nn.Module, KroneckerFactors]:
        """(S, Ā) of each layer, as means over examples."""
        factors = self._moments.results(scales)
        for layer, (positions, inputs) in self._by_layer.items():
            outputs, *_ = next(self._values[p] for p in layer.parameters() if p in self._values)
            factors[layer] = KroneckerFactors((outputs.contiguous() * (scales.gradient / positions), inputs))
        return factors

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
        if self.quantity != "kfac":  # KFRA has no vector-Jacobian products; KFLR needs separate examples
            is_kfra = self.quantity == "kfra"
            unknown += [unit.label for unit in passing if is_kfra or uses_batch_statistics(unit.module)]
        advice = "" if self.quantity == "kfac" else "Use factors='kfac', which supports more layers. "
        refuse(
            [(f"BackPACK's {self.quantity} does not pass through ", unknown)],
            f"{advice}Use engine='fused', or freeze the layer with requires_grad_(False).",
        )


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
        x = module.input0.detach().requires_grad_()
        with self.as_modules.paused(), torch.enable_grad():
            output = _recomputed(module, x)
        return torch.stack([torch.autograd.grad(output, x, column, retain_graph=True)[0] for column in columns])


def _recomputed(module: Any, x: Tensor) -> Tensor:
    """The module's output, without an update of BatchNorm's running statistics."""
    if isinstance(module, BatchNormBase):
        on_batch = uses_batch_statistics(module)
        mean, var = (None, None) if on_batch else (module.running_mean, module.running_var)
        return F.batch_norm(x, mean, var, module.weight, module.bias, on_batch, 0.0, module.eps)
    output: Tensor = type(module).forward(module, x)
    return output
