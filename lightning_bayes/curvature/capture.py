"""The base class of captures: a capture collects the results of one forward and backward pass."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_bayes.curvature.host_division import possible_divisors
from lightning_bayes.curvature.layer_graph import LAYER, can_repeat_backward
from lightning_bayes.curvature.layout_probe import ModelCall, PassLayouts, ProbedPass
from lightning_bayes.curvature.layouts import LayerOutput, different_sizes, retained_grads_kept
from lightning_bayes.curvature.loss import LOSSES, LossRecord, LossReduction, compared, settled
from lightning_bayes.curvature.loss_reader import ExampleRows, LossReader
from lightning_bayes.curvature.plan import LossReading, PassPlan
from lightning_bayes.curvature.single_examples import SingleExamples, example_rows
from lightning_bayes.curvature.tape import Tape
from lightning_bayes.errors import (
    ExampleDimensionError,
    NoMeasurementError,
    ShapeError,
    UnsupportedTrainingError,
)
from lightning_bayes.private_torch import is_alive, tree_leaves


class Capture(ABC):
    """The results of one pass.

    Args:
        loss_reduction: How the loss reduces its examples, see `loss.settled`.
        plan: What is settled for the pass; None if no layer is measured.

    Attributes:
        squares: Σ_i c_i² by parameter, on the scale of the loss that was differentiated.
        sizes: The different numbers of examples that each unit saw, by the unit's label.
        in_factors: The parameters that Kronecker factors measure.
        left_out: Trainable parameters that are not measured.
        unmeasured: The parameters whose gradient is not the sum of the measured contributions.
        scale: The record of the last observed loss, with its reduction settled.
        loss: The observed loss, detached; None before `observe`.
        divisors: The numbers of micro-batches by which the training loop may have divided the loss; see `host_division`.
        outputs: The calls of measured modules.
        tape: The operations of the forward pass; set when the pass begins.
        model_call: The first call of the whole model with equally many input and output rows.
        is_following: Whether the running backward follows single examples and measures nothing.
        stores_backward: Whether the backward of the loss is measured, not a separate one.
        paddings: The padding_idx of the look-ups in each table; complete after the pass.
        has_taken_examples: Whether the squares come from explicit per-example losses.
    """

    tape: Tape
    needs_call: bool = False  # whether `scale` has to hold the call of the loss function

    def __init__(self, loss_reduction: LossReduction = "auto", plan: PassPlan | None = None) -> None:
        self.loss_reduction, self.plan, self._has_layers = loss_reduction, plan or PassPlan([]), plan is not None
        self.outputs: list[LayerOutput] = []
        self.model_call = ModelCall()
        self.has_reentrant = False  # whether a reentrant checkpoint hides calls of layers until backward
        self.is_following, self.stores_backward, self.has_taken_examples = False, True, False
        self.layouts = PassLayouts(0, ())  # n is 0 if no layout was found
        self.squares: dict[nn.Parameter, Tensor] = {}
        self.sizes: dict[str, set[int]] = {}
        self.in_factors: set[nn.Parameter] = set()
        self.left_out: Collection[nn.Parameter] = ()
        self.unmeasured: set[nn.Parameter] = set()
        self.scale = LossRecord()
        self.loss: Tensor | None = None
        self.divisors: frozenset[int] = frozenset()
        self.paddings: Mapping[Tensor, Collection[int | None]] = {}

    @cached_property
    def reader(self) -> LossReader:
        """Reads the tape."""
        return LossReader(self.tape, self._has_layers)

    def observe(self, loss: Tensor, divided_by_host: bool = False) -> None:
        """Read how the loss reduces its examples. Call this before ``loss.backward()``.

        Args:
            loss: The loss, with its graph.
            divided_by_host: Whether the training loop added a last division, such as the one for gradient accumulation.

        Raises:
            ShapeError: If the loss is not a scalar.
            UnsupportedTrainingError: If the reduction cannot be read, or an earlier loss of the pass has another one.
            ExampleDimensionError: If layers mix the examples.
        """
        if loss.numel() != 1:
            raise ShapeError(
                f"The loss has shape {tuple(loss.shape)}; backward needs a scalar. Reduce it with .mean()."
            )
        node: Any = loss.grad_fn
        if divided_by_host and node is not None and LOSSES not in node.metadata:
            node = node.next_functions[0][0]
        if node is not None and LOSSES in node.metadata:
            self._observe_with_losses(loss, node.metadata[LOSSES], divided_by_host)
            return
        if not self.sizes and self.model_call.rows:  # no layer tells the examples: the model's outputs do
            self.model_call.edge.node.metadata[LAYER] = "the model"
        outputs = self._unreached()
        key = self._key(loss, outputs, divided_by_host)
        reading = self.plan.readings.get(key)
        reached = self._placed(outputs, reading.layouts if reading else self._find_layouts(loss, outputs))
        if reading is None:
            reading = self._read(loss, divided_by_host)
            self.plan.keep(key, reading)
        previous, self.scale = self.scale, reading.scale
        self.divisors = reading.divisors if self.loss is None else self.divisors & reading.divisors
        if self.loss is not None and self.scale.reduction != previous.reduction:
            raise UnsupportedTrainingError(
                "One backward of this pass has a loss reduced by 'sum' and another one has a loss reduced by 'mean'. Use "
                "the same reduction, or open one pass for each."
            )
        self.loss = loss.detach().clone()
        if self.layouts.error:
            raise ExampleDimensionError(self.layouts.error)
        self.handle_layouts(loss, reached)

    def _read(self, loss: Tensor, divided_by_host: bool) -> LossReading:
        """Read how a loss reduces its examples, after their layouts have been found."""
        n, order = self.known_batch_size, self.layouts.order if self.layouts.num_examples else None
        record = self.reader.read(loss, n, order, divided_by_host)
        divisors = frozenset() if divided_by_host else possible_divisors(self.reader.terms(loss), n)
        return LossReading(settled(record, self.loss_reduction, n), divisors, self.layouts)

    def _key(self, loss: Tensor, outputs: Sequence[LayerOutput], divided_by_host: bool) -> Hashable:
        """What the reading of the first loss of a pass depends on; None if it is not to be kept."""
        if self.loss is not None or self.needs_call or not outputs or len(outputs) < len(self.outputs):
            return None
        graph = self.tape.signature(loss, {node: i for i, out in enumerate(outputs) for node, _ in out.edges})
        calls = tuple((out.unit.label, out.rows, *out.shapes) for out in outputs)
        return graph and (graph, calls, self.model_call.rows, self.loss_reduction, divided_by_host)

    def _observe_with_losses(self, loss: Tensor, losses: Tensor, divided_by_host: bool) -> None:
        """Read the scale of a loss with explicit per-example losses, and measure the per-example losses."""
        record = self.reader.read(loss, len(losses), divided_by_host=divided_by_host)
        self.scale = settled(compared(record, loss, losses), self.loss_reduction, len(losses))
        self.layouts, self.loss = PassLayouts(len(losses), ()), loss.detach().clone()
        self.measure_losses(losses)

    @abstractmethod
    def measure_losses(self, losses: Tensor) -> None:
        """Measure per-example losses ``[n]`` in a separate backward, or reject them with `refuse_losses`."""

    def _unreached(self) -> list[LayerOutput]:
        """The calls that no earlier loss of the pass has reached."""
        return [out for out in self.outputs if not out.is_reached and all(is_alive(node) for node, _ in out.edges)]

    def _find_layouts(self, loss: Tensor, outputs: Sequence[LayerOutput], num_losses: int = 0) -> PassLayouts | None:
        """Where calls hold the examples; None without examples, or if no backward can follow them."""
        if loss.grad_fn is None or not outputs or not any(map(any, self.sizes.values())):
            return None
        probed = ProbedPass(loss, outputs, self.model_call, self.reader, num_losses)
        return self.plan.probe.find(probed, self.following)

    def _placed(self, outputs: Sequence[LayerOutput], layouts: PassLayouts | None) -> list[LayerOutput]:
        """Set the layout of every call that the loss reaches, and return these calls."""
        if layouts is None:
            return []
        self.layouts = layouts
        for output, layout in zip(outputs, layouts.layouts, strict=True):
            if layout is not None:
                output.layout, output.is_reached = layout, True
        return [output for output in outputs if output.is_reached]

    def single_examples(self, loss: Tensor, leaves: Sequence[nn.Parameter]) -> SingleExamples | None:
        """Backward passes from the losses of single examples to `leaves`; None if they are impossible."""
        n = self.known_batch_size
        rows = ExampleRows(1) if n == 1 else n and example_rows(self.reader, loss, n, self.layouts.order)
        can_follow = rows and (n == 1 or can_repeat_backward(loss))
        if not rows or not can_follow:
            return None
        return SingleExamples(self.reader, loss, rows, leaves)

    def note_model_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Forward hook: record the first call whose first input and first output have equally many rows."""
        if self.model_call.rows or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        inputs = (v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor) and v.dim())
        outputs = (v for v in tree_leaves(output) if isinstance(v, Tensor) and v.requires_grad and v.dim())
        first = next(outputs, None)
        if first is not None and any(len(x) == len(first) for x in islice(inputs, 1)):
            self.model_call = ModelCall(len(first), get_gradient_edge(first))

    def drop_nodes(self) -> None:
        """Drop the autograd nodes. They refer to this capture, a cycle that Python cannot collect."""
        for output in self.outputs:
            output.drop()
        self.outputs, self.model_call = [], ModelCall(self.model_call.rows)
        self.paddings = dict(self.tape.paddings)
        self.tape.clear()
        vars(self).pop("reader", None)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Run backward passes that measure nothing and leave retained gradients of layer outputs unchanged."""
        self.is_following = True
        try:
            with self.left_alone():
                yield
        finally:
            self.is_following = False

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Keep backward passes inside from BackPACK's hooks and from retained gradients of layer outputs."""
        backpack = sys.modules.get("backpack")
        hooks_off = nullcontext() if backpack is None else backpack.backpack(retain_graph=True)
        with hooks_off, retained_grads_kept(self.outputs):
            yield

    def handle_layouts(self, loss: Tensor, outputs: Sequence[LayerOutput]) -> None:
        """Prepare for the calls in `outputs`; raise `ExampleDimensionError` for layouts that the engine cannot measure."""
        return

    @property
    def known_batch_size(self) -> int | None:
        """Number of examples of the batch; None if there was no call, or if sizes differ and no layout was found."""
        sizes = set().union(*self.sizes.values()) if self.sizes else {self.model_call.rows or None}
        return self.layouts.num_examples or (next(iter(sizes)) if len(sizes) == 1 else None)

    def close(self) -> None:
        """Check a finished pass: a module was called with gradients enabled, and `observe` saw a loss."""
        if not self.sizes:
            raise NoMeasurementError(
                "No module of the model was called with gradients enabled, so there is nothing to measure. Run forward and "
                "backward inside the pass, on the model that the optimizer was built for."
            )
        self.require_loss()

    def require_loss(self) -> None:
        """Raise `UnsupportedTrainingError` unless `observe` saw a loss."""
        if self.loss is None:
            raise UnsupportedTrainingError(
                "The gradients did not come from loss.backward(), so it is unknown whether the loss is a mean or a sum over "
                "the examples. Call loss.backward() instead of torch.autograd.backward(loss)."
            )

    @property
    def is_empty(self) -> bool:
        """Whether no layer saw an example. A single layer may see none, such as an expert that receives no row."""
        return any(self.sizes.values()) and not any(size for sizes in self.sizes.values() for size in sizes)

    @property
    def num_examples(self) -> int:
        """Number of examples that count in the loss, n.

        Raises:
            ExampleDimensionError: If layers saw different numbers of examples, or no example.
        """
        if n := self.known_batch_size:
            return self.scale.num_counted or n
        if self.is_empty:
            raise ExampleDimensionError(
                f"The batch holds no example (seen by {next(iter(self.sizes))}), so its mean is undefined. Skip it: drop "
                "empty batches in the data loader, or return None from training_step."
            )
        if any(self.sizes.values()):
            raise ExampleDimensionError(different_sizes(self.sizes, self.has_reentrant))
        return 1

    @property
    def shows_mean(self) -> bool:
        """Whether the loss is known to be a mean over the examples. With one example, mean and sum coincide."""
        is_known = self.loss is not None and (self.known_batch_size or 0) > 1
        return self.loss_reduction == "mean" or (is_known and self.scale.reduction == "mean")

    @property
    def gradient_factor(self) -> float:
        """Factor from the gradient that backward computes to the mean gradient."""
        return 1.0 if self.scale.reduction == "mean" else 1.0 / self.num_examples

    def mean_curvature(self) -> dict[nn.Parameter, Tensor]:
        """(1/n) Σ_i g_i² by parameter; a GradScaler's loss scale is not removed."""
        n = self.num_examples
        return self.scaled_squares(float(n) if self.scale.reduction == "mean" else 1 / n)

    def scaled_squares(self, factor: float) -> dict[nn.Parameter, Tensor]:
        """Multiply `squares` by `factor` in place and return them."""
        if self.squares:
            torch._foreach_mul_(list(self.squares.values()), factor)
        return dict(self.squares)
