"""The BackPACK engine: `backpack.extensions.SumGradSquared` with the interface of the fused engine.

BackPACK (Dangel et al. 2020, https://arxiv.org/abs/1912.10985) calls one *module extension* per layer in its backward hooks.
Our module extensions pass the layer's input and output gradient to the layer's rule. This adds the layer types that have a
rule, such as BatchNorm in training mode, LayerNorm, GroupNorm and embeddings with padding, and a faster convolution.
Recurrent layers are an exception: their rule needs the gradients of all outputs, which a backward hook does not receive.
With ``own_rules=False`` BackPACK uses its own implementation, which shares no code with our rules and can validate them.

BackPACK's hooks forbid changing a layer's output in place, so modules with an ``inplace`` option run out of place inside a
capture. BackPACK silently skips or overwrites unsupported cases. This engine instead raises an error that names the
modules, before or during the first forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from backpack.extensions import SumGradSquared
from backpack.extensions.module_extension import ModuleExtension
from torch import Tensor, nn

from lightning_bayes.curvature.backpack_hooks import BackpackCapture, Calls, hooked, is_stock
from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.forward_state import in_full_precision, in_modes
from lightning_bayes.curvature.fused import HookedEngine
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.measured_modules import (
    MeasuredModule,
    refuse,
    tied_parameters,
)
from lightning_bayes.curvature.rules.batch_norm import uses_batch_statistics
from lightning_bayes.curvature.rules.random_numbers import with_rng
from lightning_bayes.curvature.rules.registry import LayerRule
from lightning_bayes.curvature.workspace import DEFAULT_MIB, Workspace
from lightning_bayes.errors import UnsupportedTrainingError

_FUSED_INSTEAD = "Use engine='fused', which measures it."


class BackpackEngine(HookedEngine):
    """Measures per-example squared gradients with BackPACK."""

    def __init__(
        self,
        model: nn.Module,
        loss_reduction: LossReduction = "auto",
        own_rules: bool = True,
        workspace_mib: float = DEFAULT_MIB,
    ) -> None:
        super().__init__(model, loss_reduction, workspace_mib)
        self.own_rules = own_rules

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Measure the passes inside the context; the capture's squares are complete on exit."""
        units = self.units()
        self._check_supported(units)
        captured, calls = BackpackCapture(self), Calls()
        extension = self._extension(units, calls)
        hooks = hooked(self.model, units, extension, _FUSED_INSTEAD, calls=calls)
        with self.run(captured), hooks as captured.squares:
            yield captured

    def _has_rule(self, unit: MeasuredModule) -> bool:
        return self.own_rules and unit.rule is not None and unit.rule.by_hooks

    def _extension(self, units: list[MeasuredModule], calls: Calls) -> SumGradSquared:
        extension = SumGradSquared()
        for unit in units:
            if unit.rule is not None and self._has_rule(unit):
                of_rule = _RuleExtension(unit.rule, self.workspace, calls)
                extension.set_module_extension(type(unit.module), of_rule, overwrite=True)
        return extension

    def _check_supported(self, units: list[MeasuredModule]) -> None:
        without_rule = [unit for unit in units if not self._has_rule(unit)]
        on_batch = [unit.label for unit in without_rule if uses_batch_statistics(unit.module)]
        refuse(
            [
                ("BackPACK has no rule for ", [unit.label for unit in without_rule if not is_stock(unit.module)]),
                ("BackPACK has no per-example gradients of BatchNorm in training mode: ", on_batch),
                ("BackPACK would overwrite the squares of tied parameters: ", tied_parameters(units)),
            ],
            _FUSED_INSTEAD,
        )


class _RuleExtension(ModuleExtension):  # type: ignore[misc]  # BackPACK ships no types
    """Passes the input and output gradient of BackPACK's hooks to the rule of a layer type, once per layer."""

    def __init__(self, rule: LayerRule, workspace: Workspace, calls: Calls) -> None:
        super().__init__()
        self.rule, self.workspace, self.calls = rule, workspace, calls

    def __call__(self, extension: SumGradSquared, module: Any, g_inp: Any, g_out: tuple[Tensor, ...]) -> None:
        if not hasattr(module, "input0"):  # BackPACK deletes its record of the forward in the first backward
            raise UnsupportedTrainingError(
                f"A second backward reached a {type(module).__name__}, whose input BackPACK has deleted. Add the losses and "
                "call backward once, or open one pass for each backward."
            )
        bound, modes, rng = self.calls.pop(module)
        inputs, grads = (tuple(map(in_full_precision, values)) for values in (bound.inputs, g_out))
        delta = grads[0] if len(grads) == 1 else grads
        with in_modes(modes):
            squares = with_rng(rng, self.rule.squares, module, inputs, delta, self.workspace)
        for name, param in module.named_parameters():
            if param.requires_grad:
                setattr(param, extension.savefield, squares[name])
