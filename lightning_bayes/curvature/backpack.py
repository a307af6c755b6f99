"""BackPACK as the second provider: per-example gradients and their squares, and second-order diagonals.

BackPACK (Dangel et al. 2020, https://arxiv.org/abs/1912.10985) computes them by one *module extension* per layer type.
`BackpackEngine` calls the extensions of `BatchGrad` and `SumGradSquared` as the rules of their layers. This package's rules
measure the layers that BackPACK does not have, or whose options it silently ignores: BatchNorm in training mode, LayerNorm,
GroupNorm, other padding modes of convolutions, and embeddings, where BackPACK loops over the table in the default dtype.

`SecondOrderEngine` measures the diagonals of the GGN and of the Hessian, which need the loss function and every operation of
the model as modules; see `backpack_hooks`. Unsupported operations raise an error with their name before or during the
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, final

from backpack import extensions
from torch import Tensor, nn

from lightning_bayes.curvature.backpack_hooks import BackpackCapture, is_stock, watched
from lightning_bayes.curvature.backpack_modules import AsModules, seed_labels
from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.fused import FusedCapture, HookedEngine
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.measured_modules import MeasuredModule, find_measured_modules, refuse, tied_parameters
from lightning_bayes.curvature.measurement import SecondOrderDiagonal
from lightning_bayes.curvature.private_backpack import layer_extension, supported_layers
from lightning_bayes.curvature.rules import LayerRule, rule_for
from lightning_bayes.curvature.rules.batch_norm import uses_batch_statistics
from lightning_bayes.curvature.rules.random_numbers import new_seed

_OTHERWISE = "avoid BackPACK: 'squared_gradients' in measure, VOGN, or hessian='reparameterised' in VONCallback"
_ADVICE = f"Replace the layer, freeze it with requires_grad_(False), or {_OTHERWISE}."


@final
class BackpackEngine(HookedEngine):
    """Measures per-example squared gradients by BackPACK's rules. Arguments as in `AbstractEngine`."""

    def capture(self) -> AbstractContextManager[Capture]:
        """Measure the passes inside the context; see `AbstractEngine.capture`."""
        return self.run(FusedCapture(self))

    def units(self) -> list[MeasuredModule]:
        """The measured modules, with BackPACK's rule where it has one."""
        return [unit if unit.rule is None else replace(unit, rule=_rule(unit, unit.rule)) for unit in super().units()]


def _rule(unit: MeasuredModule, own: LayerRule) -> LayerRule:
    """BackPACK's rule for a layer if it has one, else this package's rule."""
    if not is_stock(unit.module) or isinstance(unit.module, nn.Embedding) or uses_batch_statistics(unit.module):
        return own
    squares = _by(extensions.SumGradSquared())
    return replace(own, contributions=_by(extensions.BatchGrad()), _fast_squares=squares, _fast_sums=None, _saved=None)


def _by(extension: Any) -> Callable[..., dict[str, Tensor]]:
    """The function of a rule that calls an extension of BackPACK."""

    def compute(layer: nn.Module, inputs: tuple[Any, ...], grad_output: Tensor, *_: Any) -> dict[str, Tensor]:
        of_layer = layer_extension(extension, type(layer))
        delta = grad_output.clone()  # results may be views of it, and their callers overwrite them
        attributes, needed = (
            vars(layer),
            {"input0": inputs[0], "output": delta},
        )  # BackPACK reads only the output's shape
        users = {name: attributes[name] for name in needed if name in attributes}
        attributes.update(needed)
        try:
            names = [name for name, param in layer.named_parameters() if param.requires_grad]
            return {name: getattr(of_layer, name)(extension, layer, (), (delta,), None) for name in names}
        finally:
            for name in needed:
                del attributes[name]
            attributes.update(users)

    return compute


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
    def capture(self) -> Iterator[Capture]:
        """Measure one pass inside the context; call the capture's `observe` before backward."""
        extension = self._extension()
        supported = supported_layers(extension)
        self._refuse_unsupported(supported)
        # Frozen layers, too. If curvature has to pass through one that is missing here, the check of the next layer fails.
        modules = [MeasuredModule(name, module, rule_for(module)) for name, module in self.model.named_modules()]
        layers = [unit for unit in modules if _is_supported(unit, supported) and not uses_batch_statistics(unit.module)]
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

    def _refuse_unsupported(self, supported: set[type[nn.Module]]) -> None:
        units, quantity = find_measured_modules(self.model), self.quantity
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
