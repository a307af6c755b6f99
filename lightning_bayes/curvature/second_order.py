"""Second-order quantities through BackPACK: diagonals of the GGN and of the Hessian, KFLR and KFRA.

BackPACK (Dangel et al. 2020, https://arxiv.org/abs/1912.10985) needs to see the loss function and every operation of the
model as modules; `AsModules` shows them to it. What it does not know is refused by name before or during the forward.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from backpack import backpack, extensions
from torch import Tensor, nn

from lightning_bayes.curvature.engine import AbstractEngine, Capture
from lightning_bayes.curvature.hooks import (
    calls_checked,
    collect,
    extended,
    in_place_refused,
    is_stock,
    out_of_place,
    refuse,
    tied_parameters,
)
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.measured_modules import MeasuredModule, find_measured_modules
from lightning_bayes.curvature.measurement import KroneckerFactors, SecondOrderQuantity
from lightning_bayes.curvature.modules import AsModules
from lightning_bayes.curvature.private_backpack import known_layers
from lightning_bayes.curvature.rules import rule_for
from lightning_bayes.curvature.rules.batch_norm import uses_batch_statistics
from lightning_bayes.errors import UnsupportedLayerError, UnsupportedTrainingError

_OTHERWISE = "do without BackPACK: 'squared_gradients' in measure, VOGN, or hessian='reparameterised' in VONCallback"
_ADVICE = f"Replace the layer, freeze it with requires_grad_(False), or {_OTHERWISE}."
_ONE_CALL = f"Give each call a layer of its own, or {_OTHERWISE}."
_LOSS = (
    "Return what F.cross_entropy, F.mse_loss or F.binary_cross_entropy_with_logits (or their modules) returns, with "
    "nothing added or scaled."
)


class SecondOrderEngine(AbstractEngine):
    """Measures one of BackPACK's second-order quantities.

    Args:
        model: The model.
        quantity: What to measure.
        loss_reduction: How losses reduce their examples.
        mc_samples: Draws per example of ``"diag_ggn_mc"``.
    """

    def __init__(
        self,
        model: nn.Module,
        quantity: SecondOrderQuantity,
        loss_reduction: LossReduction = "auto",
        mc_samples: int = 1,
    ) -> None:
        super().__init__(model, loss_reduction)
        self.quantity, self.mc_samples = quantity, mc_samples

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Measure the one pass inside the context.

        Yields:
            The capture; its curvature is complete on exit. Show it the loss before backward.
        """
        extension = _extension(self.quantity, self.mc_samples)
        units, known = find_measured_modules(self.model), _known_layers(extension)
        _check_supported(units, known, self.quantity)
        layers = _layers(self.model, known)
        as_modules = AsModules(self.quantity)
        captured = _SecondOrderCapture(self.loss_reduction, as_modules)
        with ExitStack() as undo:
            undo.callback(collect, units, extension.savefield)  # after a failure nothing may stay on the parameters
            undo.enter_context(out_of_place(self.model))
            undo.enter_context(calls_checked(layers, captured, _ONE_CALL))
            for layer in layers:
                hook = partial(_check_source, layer, as_modules)
                undo.callback(layer.module.register_forward_pre_hook(hook).remove)
            undo.enter_context(extended([layer.module for layer in layers]))
            undo.enter_context(backpack(extension))
            undo.enter_context(in_place_refused(_ADVICE, captured))
            undo.enter_context(as_modules)
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            undo.enter_context(_backpack_errors_named(self.quantity))
            yield captured
            captured.squares.update(collect(units, extension.savefield))


class _SecondOrderCapture(Capture):
    def __init__(self, loss_reduction: LossReduction, as_modules: AsModules) -> None:
        super().__init__(loss_reduction)
        self.as_modules = as_modules

    def observe(self, loss: Tensor, divided_by_host: bool = False) -> None:
        super().observe(loss, divided_by_host)
        torch.set_default_dtype(loss.dtype)  # BackPACK builds the kernels of its pooling in the default dtype
        _check_loss(loss.grad_fn, divided_by_host, self.as_modules)

    def mean_curvature(self) -> dict[nn.Parameter, Any]:
        factor = self.gradient_factor()
        return {param: _scaled(value, factor) for param, value in self.squares.items()}


def _extension(quantity: SecondOrderQuantity, mc_samples: int) -> Any:
    if quantity == "diag_ggn_mc":
        return extensions.DiagGGNMC(mc_samples)
    known = {
        "diag_ggn": extensions.DiagGGNExact,
        "diag_hessian": extensions.DiagHessian,
        "kflr": extensions.KFLR,
        "kfra": extensions.KFRA,
    }
    return known[quantity]()


def _known_layers(extension: Any) -> set[type[nn.Module]]:
    known = known_layers(extension)
    if isinstance(extension, (extensions.KFLR, extensions.KFRA)):
        # These factors would be those of the transposed weight.
        known -= {nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d}
    return known


def _check_supported(units: list[MeasuredModule], known: set[type[nn.Module]], quantity: str) -> None:
    on_batch = [unit.label for unit in units if uses_batch_statistics(unit.module)]
    refuse(
        [
            (f"BackPACK has no rule of {quantity} for ", [unit.label for unit in units if not _is_known(unit, known)]),
            (f"BackPACK has no {quantity} of BatchNorm in training mode: ", on_batch),
            ("BackPACK would overwrite the curvature of tied parameters: ", tied_parameters(units)),
        ],
        _ADVICE,
    )


def _is_known(unit: MeasuredModule, known: set[type[nn.Module]]) -> bool:
    return is_stock(unit.module) and type(unit.module) in known


def _layers(model: nn.Module, known: set[type[nn.Module]]) -> list[MeasuredModule]:
    """Every layer that curvature can pass through, frozen ones too; operations without parameters are functions."""
    # A frozen layer that is left out here is noticed by its successor, if curvature has to pass.
    layers = [MeasuredModule(name, module, rule_for(module)) for name, module in model.named_modules()]
    return [layer for layer in layers if _is_known(layer, known) and not uses_batch_statistics(layer.module)]


def _check_source(layer: MeasuredModule, as_modules: AsModules, module: nn.Module, args: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled():
        as_modules.require_known(args[0], layer.label)


def _check_loss(node: Any, divided_by_host: bool, as_modules: AsModules) -> None:
    if not as_modules.losses:
        raise UnsupportedTrainingError(f"BackPACK needs the loss as one function that it knows. {_LOSS}")
    if divided_by_host and node is not None:
        node = node.next_functions[0][0]
    if not any(node is known.grad_fn for known in as_modules.losses):
        raise UnsupportedTrainingError(
            f"The loss is not the result of one loss function alone, so BackPACK would miss the rest of it. {_LOSS}"
        )


@contextmanager
def _backpack_errors_named(quantity: str) -> Iterator[None]:
    try:
        yield
    except (NotImplementedError, AssertionError, ValueError) as error:
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if not any("backpack" in Path(name).parts for name in frames):
            raise
        raise UnsupportedLayerError(
            f"BackPACK cannot measure {quantity} of this model: {str(error).rstrip('.')}. {_ADVICE}"
        ) from error


def _scaled(value: Tensor | list[Tensor], factor: float) -> Tensor | KroneckerFactors:
    """BackPACK's value is in the scale of the loss, like the gradient: the same factor makes it a mean over examples."""
    if isinstance(value, Tensor):
        return value * factor
    first, *rest = (factor_matrix.contiguous() for factor_matrix in value)
    return KroneckerFactors((first * factor, *rest))
