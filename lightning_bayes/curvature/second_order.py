"""Diagonals of the GGN and of the Hessian, computed by BackPACK.

BackPACK (Dangel et al. 2020, https://arxiv.org/abs/1912.10985) needs the loss function and every operation of the model as
modules; `AsModules` provides them. Unsupported operations raise an error with their name before or during the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from backpack import extensions
from torch import nn

from lightning_bayes.curvature.backpack_hooks import BackpackCapture, is_stock, watched
from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.fused import HookedEngine
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.measured_modules import (
    MeasuredModule,
    find_measured_modules,
    refuse,
    tied_parameters,
)
from lightning_bayes.curvature.measurement import SecondOrderDiagonal
from lightning_bayes.curvature.modules import AsModules
from lightning_bayes.curvature.private_backpack import supported_layers
from lightning_bayes.curvature.rules import rule_for
from lightning_bayes.curvature.rules.batch_norm import uses_batch_statistics
from lightning_bayes.curvature.rules.random_numbers import new_seed
from lightning_bayes.curvature.seeded_labels import seed_labels

_OTHERWISE = "avoid BackPACK: 'squared_gradients' in measure, VOGN, or hessian='reparameterised' in VONCallback"
_ADVICE = f"Replace the layer, freeze it with requires_grad_(False), or {_OTHERWISE}."


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
    def capture(self) -> Iterator[Capture]:
        """Measure one pass inside the context; call the capture's `observe` before backward."""
        extension = self._extension()
        units, supported = find_measured_modules(self.model), supported_layers(extension)
        _check_supported(units, supported, self.quantity)
        layers = _layers(self.model, supported)
        as_modules = AsModules(self.quantity)
        captured = BackpackCapture(self, as_modules)
        hooks = watched(self.model, layers, extension, as_modules, _OTHERWISE)
        with self.run(captured), hooks as captured.squares:
            yield captured

    def _extension(self) -> Any:
        if self.quantity != "diag_ggn_mc":
            return extensions.DiagGGNExact() if self.quantity == "diag_ggn" else extensions.DiagHessian()
        extension = extensions.DiagGGNMC(self.mc_samples)
        seed_labels(extension, self.mc_samples, new_seed() if self.seed is None else self.seed)
        return extension


def _check_supported(units: list[MeasuredModule], supported: set[type[nn.Module]], quantity: str) -> None:
    unsupported = [unit.label for unit in units if not _is_supported(unit, supported)]
    on_batch = [unit.label for unit in units if uses_batch_statistics(unit.module)]
    refuse(
        [
            (f"BackPACK has no rule of {quantity} for ", unsupported),
            (f"BackPACK has no {quantity} of BatchNorm in training mode: ", on_batch),
            ("BackPACK would overwrite the curvature of tied parameters: ", tied_parameters(units)),
        ],
        _ADVICE,
    )


def _is_supported(unit: MeasuredModule, supported: set[type[nn.Module]]) -> bool:
    return is_stock(unit.module) and type(unit.module) in supported


def _layers(model: nn.Module, supported: set[type[nn.Module]]) -> list[MeasuredModule]:
    """Every layer that curvature can pass through, including frozen layers; `AsModules` handles parameter-free ones."""
    # If curvature has to pass through a frozen layer that is missing here, the check of the next layer detects it.
    layers = [MeasuredModule(name, module, rule_for(module)) for name, module in model.named_modules()]
    return [layer for layer in layers if _is_supported(layer, supported) and not uses_batch_statistics(layer.module)]
