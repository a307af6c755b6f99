"""BackPACK's `KFAC`, `KFLR` and `KFRA` as a source of a layer's factors, behind the same captures as our own.

BackPACK (Dangel et al. 2020, https://arxiv.org/abs/1912.10985) computes S' and A of linear layers and convolutions without
groups; `curvature.factors.conversion` has the algebra from there to S and Ā. It carries curvature from the loss back to each
layer, so every operation in between must let it through. What it does not know itself does so by a vector-Jacobian product
(`_PassThrough`), under KFAC and KFLR.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from backpack import backpack, extensions
from backpack.extensions.module_extension import ModuleExtension
from torch import Tensor, nn

from lightning_bayes.curvature.backpack_watch import BackpackCapture, watched
from lightning_bayes.curvature.factors import FactorMoments, input_factor
from lightning_bayes.curvature.factors.conversion import join_bias, summed_patches
from lightning_bayes.curvature.factors.layer_records import FactorRecords, Request
from lightning_bayes.curvature.hooks import collect, is_stock
from lightning_bayes.curvature.measured_modules import MeasuredModule, find_measured_modules, refuse
from lightning_bayes.curvature.measurement import KroneckerFactors, KroneckerQuantity
from lightning_bayes.curvature.modules import AsModules
from lightning_bayes.curvature.private_backpack import known_layers, layer_extension
from lightning_bayes.curvature.rules import rule_for
from lightning_bayes.curvature.rules.batch_norm import uses_batch_statistics
from lightning_bayes.curvature.rules.registry import computes
from lightning_bayes.curvature.seeded_labels import seed_labels
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
_FRESH = (  # what `AsModules` makes of functions that BackPACK's table of factors lacks
    *(nn.ELU, nn.SELU, nn.LeakyReLU, nn.LogSigmoid, nn.MaxPool1d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
_OTHERWISE = "measure by engine='fused'"
_ADVICE = "Measure by engine='fused', or freeze the layer with requires_grad_(False)."


@final
class _KFLR(extensions.KFLR):  # type: ignore[misc]  # BackPACK ships no types
    """KFLR through branches: columns of a square root of the Hessian add up over paths, as those of KFAC do."""

    def accumulate_backpropagated_quantities(self, existing: Tensor, other: Tensor) -> Tensor:
        """The sum of both paths' columns."""
        return existing + other


_EXTENSIONS = {"kflr": _KFLR, "kfra": extensions.KFRA}


def has_backpack_factors(layer: nn.Module) -> bool:
    """Whether BackPACK has factors for `layer`: a linear layer or a convolution without groups that pads with zeros."""
    return type(layer) in _WITH_FACTORS and is_stock(layer) and getattr(layer, "groups", 1) == 1


class _Seen(NamedTuple):
    """The part of a layer's call that BackPACK does not report."""

    positions: int  # T
    mean_input: Tensor  # m, [K]
    inputs: Tensor | None  # Ā, where BackPACK computes none because the weight is frozen


@final
class BackpackFactors(FactorRecords):
    """Factors by BackPACK where it has them, by our own rules for the other layers of the request.

    Args:
        request: The layers and labels to measure.
        workspace: Memory for what is needed for a moment.
        quantity: ``"kfac"``, ``"kflr"`` or ``"kfra"``.
    """

    def __init__(self, request: Request, workspace: Workspace, quantity: KroneckerQuantity) -> None:
        super().__init__(request, workspace)
        if request.loss_scale != 1:
            raise UnsupportedTrainingError(
                f"BackPACK's {quantity} takes no scaled loss, such as that of a torch.amp.GradScaler or of "
                "precision='16-mixed'. Train without, in precision='32-true', or by engine='fused'."
            )
        self.quantity = quantity
        self._own = FactorMoments(request, workspace)
        self._theirs = {layer for layer in request.layers if has_backpack_factors(layer)}
        self._seen: dict[nn.Module, _Seen] = {}
        self._values: dict[nn.Parameter, list[Tensor]] = {}
        self._as_modules = AsModules(quantity, _OTHERWISE)

    @property
    def called(self) -> Collection[nn.Module]:
        """The layers with a call."""
        return [*self._own.called, *self._seen]

    def add(self, layer: nn.Module, x: Tensor, grad_output: Tensor, is_first: bool = True) -> None:
        """Note of a call what BackPACK does not tell; see `LayerRecords.add`."""
        if layer not in self._theirs:
            self._own.add(layer, x, grad_output, is_first)
            return
        has_weight = layer.weight.requires_grad
        inputs = None if has_weight else input_factor(layer, x, bias=self.request.layers[layer])
        positions = grad_output.shape[2:].numel()
        self._seen[layer] = _Seen(positions, summed_patches(layer, x, grad_output.shape), inputs)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Set BackPACK's hooks for the passes inside; see `LayerRecords.watching`."""
        units = find_measured_modules(model)
        extension = self._extension()
        layers, passing = self._division(model)
        self._check(units, layers, passing)
        _let_through(extension, passing, self._as_modules)
        with ExitStack() as undo:
            undo.callback(collect, units, extension.savefield)  # after a failure nothing may stay on the parameters
            seen = BackpackCapture()
            undo.enter_context(watched(model, [*layers, *passing], extension, self._as_modules, seen, _OTHERWISE))
            yield
            self._values = collect(units, extension.savefield)

    def observe(self, loss: Tensor, divided_by_host: bool) -> None:
        """Require a loss that BackPACK has seen; see `LayerRecords.observe`."""
        self._as_modules.require_loss(loss, divided_by_host)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let a backward pass BackPACK's hooks by; see `LayerRecords.aside`."""
        with backpack(retain_graph=True), self._as_modules.paused():
            yield

    def mean_factors(self, output_scale: float, loss_scale: float) -> dict[nn.Module, KroneckerFactors]:
        """(S, Ā) of each layer; see `FactorRecords.mean_factors`."""
        found = self._own.mean_factors(output_scale, loss_scale)
        return {**found, **{layer: self._factors(layer, seen, loss_scale) for layer, seen in self._seen.items()}}

    def _factors(self, layer: nn.Module, seen: _Seen, loss_scale: float) -> KroneckerFactors:
        values = next(values for param, values in self._values.items() if param is layer.weight or param is layer.bias)
        outputs = values[0].contiguous() * (loss_scale / seen.positions)
        if seen.inputs is not None:
            return KroneckerFactors((outputs, seen.inputs))
        inputs = values[1].contiguous()
        joined = join_bias(inputs, seen.mean_input, seen.positions) if self.request.layers[layer] else inputs
        return KroneckerFactors((outputs, joined))

    def _extension(self) -> Any:
        if self.quantity != "kfac":
            return _EXTENSIONS[self.quantity]()
        extension = extensions.KFAC(self.request.mc_samples)
        seed_labels(extension, self.request.mc_samples, self.request.seed)
        return extension

    def _division(self, model: nn.Module) -> tuple[list[MeasuredModule], list[MeasuredModule]]:
        """The layers that BackPACK takes itself, and those that let curvature through by a vector-Jacobian product."""
        layers, passing = [], []
        for name, module in model.named_modules():
            unit = MeasuredModule(name, module, rule_for(module))
            is_trained = any(param.requires_grad for param in module.parameters(recurse=False))
            if has_backpack_factors(module) and (module in self._theirs or not is_trained):
                layers.append(unit)
            elif type(module) in _PASSABLE and computes(module, type(module).forward):
                passing.append(unit)
        return layers, passing

    def _check(self, units: list[MeasuredModule], layers: list[MeasuredModule], passing: list[MeasuredModule]) -> None:
        seen = {unit.module for unit in (*layers, *passing)}
        through = [unit.label for unit in units if unit.module not in seen]
        stopped = [unit.label for unit in passing if not _passes(unit.module, self.quantity)]
        refuse(
            [
                (f"BackPACK's {self.quantity} cannot pass through ", through),
                (f"BackPACK's {self.quantity} does not pass through ", stopped),
            ],
            _ADVICE if self.quantity == "kfac" else f"Use factors='kfac', which does where it can. {_ADVICE}",
        )


def _passes(module: nn.Module, quantity: KroneckerQuantity) -> bool:
    """KFRA needs a rule of each layer for matrices; KFLR needs examples that do not mix."""
    return quantity == "kfac" or (quantity == "kflr" and not uses_batch_statistics(module))


def _let_through(extension: Any, passing: list[MeasuredModule], as_modules: AsModules) -> None:
    """Teach `extension` the modules in `passing`, and the functions that it does not know."""
    through = _PassThrough(as_modules)
    known = {kind: layer_extension(extension, kind) for kind in known_layers(extension)}
    for kind in {*_FRESH, *(type(unit.module) for unit in passing)}:
        theirs = known.get(kind)
        chosen = through if theirs is None else _EitherWay(theirs, through, {unit.module for unit in passing})
        extension.set_module_extension(kind, chosen, overwrite=True)


@final
class _PassThrough(ModuleExtension):  # type: ignore[misc]  # BackPACK ships no types
    """Carries columns back through a module by its vector-Jacobian product, and keeps nothing of its parameters."""

    def __init__(self, as_modules: AsModules) -> None:
        super().__init__()
        self.as_modules = as_modules

    def backpropagate(self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Tensor) -> Tensor:
        """Columns ``[V, N, *out]`` at the output to ``[V, N, *in]`` at the input."""
        if isinstance(extension, extensions.KFRA):
            raise NotImplementedError(f"kfra has no rule for {type(module).__name__}")
        with self.as_modules.paused(), torch.enable_grad():
            x = module.input0.detach().requires_grad_()
            output = _again(module, x)
        parts = [torch.autograd.grad(output, x, column, retain_graph=True)[0] for column in columns]
        return torch.stack(parts)


@final
class _EitherWay(ModuleExtension):  # type: ignore[misc]
    """BackPACK's own extension of a layer type, except for some of its modules, which only let curvature through."""

    def __init__(self, theirs: ModuleExtension, through: _PassThrough, passing: set[nn.Module]) -> None:
        super().__init__()
        self.theirs, self.through, self.passing = theirs, through, passing

    def __call__(self, extension: Any, module: nn.Module, g_inp: Any, g_out: Any) -> None:
        chosen = self.through if module in self.passing else self.theirs
        chosen(extension, module, g_inp, g_out)


def _again(module: Any, x: Tensor) -> Tensor:
    """The module's output once more; BatchNorm counts no batch twice."""
    if isinstance(module, BatchNormBase):
        on_batch = uses_batch_statistics(module)
        mean, var = (None, None) if on_batch else (module.running_mean, module.running_var)
        return F.batch_norm(x, mean, var, module.weight, module.bias, on_batch, 0.0, module.eps)
    output: Tensor = type(module).forward(module, x)
    return output
