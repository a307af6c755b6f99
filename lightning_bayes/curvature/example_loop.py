"""Contributions one example at a time, for parameters whose gradient no rule can split into examples.

If all examples share the output of a layer (position embeddings, relative-position tables), or if a parameter is used
outside of its layer, its gradient is already a sum over the batch. So the loop runs one backward per example:

    c_i = ∂L/∂v_i · ∂v_i/∂θ

This is exact. It needs as many backward passes as the batch has examples; each stops at the shared outputs and parameters.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.layouts import LOOPED, LayerOutput
from lightning_bayes.curvature.loss_reading import LossReader
from lightning_bayes.curvature.loss_scale import read_loss
from lightning_bayes.curvature.measured_output import in_full_precision, in_train_modes, inputs_of, without_autocast
from lightning_bayes.curvature.single_examples import Gradients, SingleExamples, can_repeat_backward
from lightning_bayes.errors import ExampleDimensionError, UnsupportedTrainingError, name_some

if TYPE_CHECKING:
    from lightning_bayes.curvature.fused import FusedCapture


class ExampleLoop:
    """Computes contributions to parameters from one loss, one example at a time."""

    def __init__(self, captured: FusedCapture) -> None:
        self.captured = captured
        self._squares: dict[nn.Parameter, Tensor] = {}  # Σ_i c_i², on the scale of the observed loss
        self._shared: dict[nn.Parameter, Tensor] = {}  # c_i of parameters with other uses, [n, *shape]

    def run(self, loss: Tensor, outputs: Sequence[LayerOutput], leaves: Sequence[nn.Parameter]) -> None:
        """Compute the contributions from calls with a shared output, and from uses of `leaves` outside of layers."""
        captured, n = self.captured, self.captured.known_batch_size
        reader = read_loss(loss, n or 1, captured.loss_reduction, captured.layouts.examples_second)
        # If the loop is impossible, the check after the pass names the parameters without a measurement.
        if n != 1 and (reader is None or not can_repeat_backward(loss)):
            return
        examples = SingleExamples(loss, reader, outputs, leaves)
        if not examples.is_possible:
            return
        after_layers = set() if reader is None else _leaves_after_layers(reader)
        with captured.following(), without_autocast(loss.device.type), torch.no_grad():
            self._follow(examples, leaves, after_layers)
        for leaf in leaves:
            del captured.uses[leaf]
        for output in outputs:
            output.layout = LOOPED
        if n != 1:
            self._warn(outputs, [leaf for leaf in leaves if leaf not in after_layers], examples.num_examples)
        loss.grad_fn.register_prehook(self._pass_on)  # type: ignore[union-attr]

    def _follow(self, examples: SingleExamples, leaves: Sequence[nn.Parameter], after_layers: set[Any]) -> None:
        """Run one backward per example, and store the contributions or their squares."""
        calls, outputs = self.captured.calls, examples.outputs
        looped = Counter(param for output in outputs for param in output.edges[0][0].record.params.values())
        rows: dict[nn.Parameter, list[Tensor]] = {p: [] for p in {*looped, *leaves} if calls[p] > looped[p]}
        with examples.separated() as gradients:
            # Gradients of the terms that depend on no example, such as a penalty on the weights.
            grads = zip(leaves, gradients(None).others, strict=True)
            constant = {param: grad for param, grad in grads if grad is not None}
            self._require_no_term(p for p, grad in constant.items() if p in after_layers and bool(grad.any()))
            sums = dict(constant)
            for example in range(examples.num_examples):
                for param, value in _by_parameter(outputs, leaves, gradients(example)).items():
                    value = value - constant[param] if param in constant else value
                    _add(sums, param, value)
                    if param in rows:  # other calls use the parameter
                        rows[param].append(value)
                    else:
                        _add(self._squares, param, value.square())
        self._require_equal(_by_parameter(outputs, leaves, examples.batch_gradients()), sums)
        self._shared.update({param: torch.stack(values) for param, values in rows.items() if values})
        calls.update(param for param in leaves if param in rows)

    def _require_equal(self, batch_grads: dict[nn.Parameter, Tensor], sums: dict[nn.Parameter, Tensor]) -> None:
        """Require per-example gradients that add up to the batch gradient."""
        largest = max(float(grad.abs().max()) for grad in batch_grads.values())
        for param, total in sums.items():
            grad = batch_grads[param]
            # The term in `largest` allows for parameters whose gradient is only rounding, such as an attention key's bias.
            atol = 1e-3 * float(grad.abs().max()) + 1e-6 * largest
            if bool(grad.isfinite().all()) and not torch.allclose(total, grad, rtol=1e-2, atol=atol):
                raise ExampleDimensionError(
                    f"{self._names[param]} is shared by all examples, but the per-example gradients do not add up to its "
                    "gradient: examples mix on the way to the loss, for instance by BatchNorm in training mode. Call "
                    ".eval() on such layers, or freeze the parameter with requires_grad_(False)."
                )

    def _require_no_term(self, params: Iterable[nn.Parameter]) -> None:
        """Refuse terms such as ``log_sigma`` added to a mean: part of each example's loss, or a penalty."""
        names = [self._names[param] for param in params]
        if names:
            raise UnsupportedTrainingError(
                f"{names[0]} is in a term of the loss that depends on no example, so it may be part of each example's loss "
                "or a penalty. Add it to the per-example losses before the reduction, as in (squared_error / sigma**2 + "
                f"log_sigma).mean(), or remove it. Parameters: {name_some(names, 160)}."
            )

    @property
    def _names(self) -> dict[nn.Parameter, str]:
        return {param: name for name, param in self.captured.engine.model.named_parameters()}

    def _pass_on(self, grads: tuple[Tensor | None, ...]) -> None:
        """Prehook of the loss: pass the contributions to the capture, on the scale of the loss that is differentiated."""
        accumulators = [get_gradient_edge(param).node for param in (*self._squares, *self._shared)]
        if grads[0] is None or not self.captured.should_measure(accumulators):
            return
        scale = grads[0].detach()
        for param, square in self._squares.items():
            self.captured.add(param, square * scale**2)
        for param, contributions in self._shared.items():
            self.captured.add_contributions(param, contributions * scale)
        self._squares.clear()  # the loss, and with it this hook, may outlive the pass
        self._shared.clear()

    def _warn(self, outputs: Sequence[LayerOutput], params: Sequence[nn.Parameter], num_examples: int) -> None:
        engine = self.captured.engine
        if engine.has_warned_of_loop or not (outputs or params):
            return
        engine.has_warned_of_loop = True
        names = self._names
        labels = [*dict.fromkeys(out.unit.label for out in outputs), *(names[param] for param in params)]
        warnings.warn(
            f"{name_some(labels, 200)}: all examples share these, so their curvature needs one backward pass for each of "
            f"the {num_examples} examples, which is exact but slow. Expand their inputs to the batch, such as positions "
            "[batch, length], freeze them, or measure less often with curvature_interval.",
            stacklevel=2,
        )


def _by_parameter(
    outputs: Sequence[LayerOutput], leaves: Sequence[nn.Parameter], grads: Gradients
) -> dict[nn.Parameter, Tensor]:
    """The gradients of `leaves` and of the parameters of the calls in `outputs`."""
    gradients: dict[nn.Parameter, Tensor] = {}
    for output, output_grads in zip(outputs, grads.calls, strict=True):
        node = output.edges[0][0]
        if any(grad is not None for grad in output_grads):
            with in_train_modes(node.record.modes):
                gradient = node.record.gradient(inputs_of(node), [in_full_precision(grad) for grad in output_grads])
            for name, grad in gradient.items():
                _add(gradients, node.record.params[name], grad)
    for leaf, grad in zip(leaves, grads.others, strict=True):
        _add(gradients, leaf, torch.zeros_like(leaf) if grad is None else grad)
    return gradients


def _add(totals: dict[nn.Parameter, Tensor], param: nn.Parameter, value: Tensor) -> None:
    totals[param] = totals[param] + value if param in totals else value


def _leaves_after_layers(reader: LossReader) -> set[Any]:
    """The parameters that the loss uses after all layers."""
    return {node.variable for node in graph.in_order(reader.root, True) if graph.is_leaf(node)}
