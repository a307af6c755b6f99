"""Kronecker factors of the layers in a `Request` and per-example squares of all others, from one pass.

The hooks on layers with factors (`factors.has_factors`) accumulate the second moments of the inputs and of the output
gradients during backward. All other layers are measured by their squares, as in the fused engine.

With a likelihood, the Fisher is measured: an additional backward from the model's outputs, with labels sampled from the
likelihood, runs before the backward of the loss and changes no gradient. Without a likelihood, the backward of the loss
measures the empirical Fisher. Several calls of a layer in one pass count as positions of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, final

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from lightning_bayes.curvature.factors import FactorMoments, LayerRecords, Request, Scales, has_factors, split_bias
from lightning_bayes.curvature.fused import ExampleLoop, HookedEngine
from lightning_bayes.curvature.hooks import HookedCapture
from lightning_bayes.curvature.layer_calls import LayerCall, in_full_precision
from lightning_bayes.curvature.loss import LossReduction, refuse_losses
from lightning_bayes.curvature.measured_modules import find_measured_modules, refuse, tied_parameters
from lightning_bayes.curvature.measurement import KroneckerFactors
from lightning_bayes.curvature.rules.random_numbers import new_seed
from lightning_bayes.curvature.workspace import DEFAULT_MIB, Workspace
from lightning_bayes.errors import NoMeasurementError, UnsupportedLayerError, UnsupportedTrainingError
from lightning_bayes.likelihood import OutputLikelihood
from lightning_bayes.likelihood.loss_functions import likelihood_call
from lightning_bayes.likelihood.module_outputs import Uncopied

_NO_FACTORS = Request({})


@final
class KroneckerEngine(HookedEngine):
    """Measures Kronecker factors of the requested layers."""

    def __init__(
        self,
        model: nn.Module,
        loss_reduction: LossReduction = "auto",
        workspace_mib: float = DEFAULT_MIB,
        records: Callable[[Request, Workspace], LayerRecords] = FactorMoments,
        has_factors: Callable[[nn.Module], bool] = has_factors,
    ) -> None:
        super().__init__(model, loss_reduction, workspace_mib)
        self.new_records, self.has_factors = records, has_factors

    @contextmanager
    def capture(
        self, request: Request = _NO_FACTORS, *, left_out: Collection[nn.Parameter] = ()
    ) -> Iterator[KroneckerCapture]:
        """Measure the passes inside the context: factors of the layers in `request`, squares of all others."""
        captured = KroneckerCapture(self, request, left_out)
        hook = self.model.register_forward_hook(Uncopied(captured.keep_outputs))
        with hook, captured.records.watching(self.model), self.run(captured):
            yield captured


@final
class KroneckerCapture(HookedCapture):
    """The squares of layers without factors, and the records of layers with factors."""

    measure_losses = refuse_losses

    def __init__(self, engine: KroneckerEngine, request: Request, left_out: Collection[nn.Parameter]) -> None:
        super().__init__(engine, left_out)
        self.request, self.stores_backward = request, request.likelihood is None
        self.can_loop, self.needs_call = request.loops, request.likelihood == "of_loss"
        self.model_outputs: list[Tensor] = []
        self.records = engine.new_records(request, engine.workspace)
        self.draw = 0
        self._draws: dict[LayerCall, int] = {}  # measured by each call

    def handle_call(self, call: LayerCall, inputs: list[Any], grads: list[Tensor | None]) -> bool:
        """Add the moments of a call of a requested layer."""
        layer, delta = call.unit.module, grads[0]
        if layer not in self.request.layers:
            return False
        if not (self._is_measuring or self.stores_backward) or delta is None:
            return True
        draws = self._draws.get(call, 0)
        if draws > self.draw:
            raise UnsupportedTrainingError(
                f"A second backward reached {call.unit.label}, whose factors were already measured in this pass. Add the "
                "losses and call backward once, or open one pass for each backward."
            )
        self._draws[call] = draws + 1
        self.records.add(layer, inputs[0], delta, is_first=self.draw == 0)
        self.in_factors.update(layer.parameters())
        return True

    def loop(self, loss: Tensor, params: set[nn.Parameter]) -> None:
        """Loop over the examples for parameters without factors, if that was asked for."""
        of_factors = {param for layer in self.request.layers for param in layer.parameters()}
        without = params - of_factors if self.can_loop else set[nn.Parameter]()
        super().loop(loss, params - without)
        if without:
            ExampleLoop(self).run(loss, without)

    def keep_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model. Ignores scalars: under DDP the model's forward may run the whole training step."""
        if isinstance(output, Tensor) and output.dim() and output.requires_grad:
            self.model_outputs.append(output)

    def close(self) -> None:
        """Require also that sampled labels measured every parameter that a layer uses."""
        if isinstance(self.request.likelihood, OutputLikelihood):
            self._require_outputs()
        super().close()

    def _require_outputs(self) -> None:
        model = self.engine.model
        if not self.model_outputs:
            raise NoMeasurementError(
                f"The loss does not depend on an output of {type(model).__name__}'s forward, so no labels can be "
                "sampled. Call the model itself, self(x) in a training_step, or pass fisher='empirical'."
            )
        reached = {*self.squares, *self.in_factors}
        missed = [
            name
            for name, param in model.named_parameters()
            if param.grad is not None and param not in reached and self.calls[param]
        ]
        if missed:
            raise UnsupportedLayerError(
                f"Sampled labels cannot measure {', '.join(missed)}: all examples share them, or the outputs of "
                f"{type(model).__name__} do not depend on them. Pass fisher='empirical'. For layers under "
                "checkpoint(..., use_reentrant=True), pass use_reentrant=False instead."
            )

    @override
    def drop_nodes(self) -> None:
        super().drop_nodes()
        self._draws.clear()
        self.model_outputs = [output.detach() for output in self.model_outputs]

    def observe(self, loss: Tensor, divided_by_host: bool = False) -> None:
        """Read the loss's scale, and measure with sampled labels if there is a likelihood."""
        super().observe(loss, divided_by_host)
        self.records.observe(loss, divided_by_host)
        labels = self.request.likelihood
        if labels == "of_loss":
            call, likelihood = likelihood_call(self.scale.call, "The Fisher")
            self._measure_with_sampled_labels(likelihood, [call.outputs], call.num_terms)
        elif labels is not None and self.model_outputs and not (self.squares or self.in_factors):
            self._measure_with_sampled_labels(labels, self.model_outputs)

    def _measure_with_sampled_labels(self, likelihood: OutputLikelihood, outputs: list[Tensor], terms: int = 1) -> None:
        generator = Generator(outputs[0].device).manual_seed(self.request.seed)
        scale = self.request.loss_scale / math.sqrt(terms)
        with self.records.sampling():
            for draw in range(self.request.mc_samples):
                self.draw = draw
                losses = [likelihood.sampled_loss(in_full_precision(output), generator) for output in outputs]
                self.measuring_backward(torch.stack(losses).sum() * scale, self.calls)

    def measure_columns(self, outputs: Tensor, columns: Iterable[Tensor]) -> None:
        """Run one backward per column of output gradients (`curvature.output_roots`); squares and moments accumulate."""
        for draw, column in enumerate(columns):
            self.draw = draw
            self.measuring_backward(outputs, self.calls, column)

    def add(self, param: nn.Parameter, square: Tensor) -> None:
        """Store Σ_i c_i² of a parameter; add it to earlier draws or columns."""
        if self.draw and param in self.squares:
            self.squares[param] = self.squares[param] + square
        else:
            super().add(param, square)

    def mean_curvature(self) -> dict[nn.Parameter, Tensor]:
        """(1/n) Σ_i g_i² of the parameters without factors."""
        if self.request.likelihood is None:
            return super().mean_curvature()
        return self.scaled_squares(float(self._examples))  # the loss of the sampled labels is a mean over the batch

    def results(self) -> dict[nn.Module, Any]:
        """The result of each layer with factors that backward reached, see `LayerRecords.results`."""
        if self.request.likelihood is None:
            counted = self.num_examples
            own = (counted if self.scale.reduction == "mean" else 1) / self.request.loss_scale
        else:
            counted = self._examples
            own = counted / self.request.loss_scale
        return self.records.results(Scales(own, own**2 * self._examples / counted, self.gradient_factor))

    @property
    def _examples(self) -> int:
        return self.known_batch_size or next(iter(set().union(*self.sizes.values())))


def request_all_layers(
    engine: KroneckerEngine, source: str, quantity: str, mc_samples: int, seed: int | None
) -> Request:
    """The request that measures every layer; refuse layers without factors and tied parameters."""
    units = find_measured_modules(engine.model)
    refuse(
        [
            (f"{source} has no rule of {quantity} for ", [u.label for u in units if not engine.has_factors(u.module)]),
            (f"{source} would mix the factors of tied parameters: ", tied_parameters(units)),
        ],
        "Replace the layer, freeze it with requires_grad_(False), or measure 'squared_gradients'.",
    )
    layers = {unit.module: _trains_bias(unit.module) for unit in units}
    # BackPACK's KFAC samples its labels itself.
    likelihood: Literal["of_loss"] | None = None if source == "BackPACK" else "of_loss"
    return Request(layers, likelihood, new_seed() if seed is None else seed, mc_samples=mc_samples)


def blocks_by_parameter(captured: KroneckerCapture) -> dict[nn.Parameter, KroneckerFactors]:
    """Separate factors for every trainable weight and bias; see `curvature.factors`."""
    blocks: dict[nn.Parameter, KroneckerFactors] = {}
    for layer, factors in captured.results().items():
        weight, bias = split_bias(factors) if captured.request.layers[layer] else (factors, None)
        for param, block in ((layer.weight, weight), (layer.bias, bias)):
            if block is not None and isinstance(param, nn.Parameter) and param.requires_grad:
                blocks[param] = block
    return blocks


def _trains_bias(layer: nn.Module) -> bool:
    bias = layer.bias
    return isinstance(bias, nn.Parameter) and bias.requires_grad
