"""Contributions one example at a time, for what no rule can take apart.

A layer whose output all examples share (position embeddings, relative-position tables), and a parameter that is used
outside of its layer, have one gradient for the batch, in which the examples are added up already. So the loss of each
example is followed backwards by itself:

    c_i = ∂L/∂v_i · ∂v_i/∂θ

This is exact, and takes as many backward passes as the batch has examples, each no deeper than to what is asked for.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.layouts import LayerOutput
from lightning_bayes.curvature.loss import read_loss
from lightning_bayes.curvature.loss_reading import LossReader
from lightning_bayes.curvature.measured_output import inputs_of, without_autocast
from lightning_bayes.curvature.single_examples import SingleExamples, can_repeat_backward
from lightning_bayes.curvature.train_mode import in_train_modes
from lightning_bayes.errors import ExampleDimensionError, UnsupportedTrainingError, name_some

if TYPE_CHECKING:
    from lightning_bayes.curvature.fused import FusedCapture


class ExampleLoop:
    """Takes contributions one example at a time.

    Args:
        captured: The capture of the pass.
    """

    def __init__(self, captured: FusedCapture) -> None:
        self.captured = captured
        self._squares: dict[nn.Parameter, Tensor] = {}  # Σ_i c_i², in the scale of the observed loss
        self._shared: dict[nn.Parameter, Tensor] = {}  # c_i of parameters that have other uses, [n, *shape]
        self._scale: Tensor | float | None = None  # from the observed loss to the one that was differentiated

    def run(
        self, loss: Tensor, divided_by_host: bool, outputs: Sequence[LayerOutput], leaves: Sequence[nn.Parameter]
    ) -> None:
        """Follow each example from the loss to some calls and parameters.

        Args:
            loss: The observed loss.
            divided_by_host: As in `Capture.observe`.
            outputs: Calls whose output examples share.
            leaves: Parameters that are used outside of their layers.
        """
        captured = self.captured
        if captured.known_batch_size == 1:
            self._take_only_one(loss, leaves)
            return
        reader = read_loss(
            loss,
            captured.known_batch_size or 1,
            captured.loss_reduction,
            divided_by_host,
            captured.examples_second,
        )
        examples = None if reader is None or not can_repeat_backward(loss) else SingleExamples(loss, reader)
        if reader is None or examples is None or not examples.is_possible:
            return  # what is missing is refused by name after the pass
        late = _late(reader)
        with captured.following(), without_autocast(loss.device.type), torch.no_grad():
            self._follow(examples, outputs, leaves, late)
        captured.taken_beside.update(leaves)
        for output in outputs:
            output.is_looped = True
        self._warn(outputs, [leaf for leaf in leaves if leaf not in late], examples.num_examples)
        loss.grad_fn.register_prehook(self._note_scale)  # type: ignore[union-attr]

    def _take_only_one(self, loss: Tensor, leaves: Sequence[nn.Parameter]) -> None:
        """The gradient of the only example is that of the batch."""
        with self.captured.following():
            grads = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        for param, grad in zip(leaves, grads, strict=True):
            value = torch.zeros_like(param) if grad is None else grad
            if self.captured.calls[param]:
                self._shared[param] = value.unsqueeze(0)
                self.captured.calls[param] += 1
            else:
                self._squares[param] = value.square()
        self.captured.taken_beside.update(leaves)
        loss.grad_fn.register_prehook(self._note_scale)  # type: ignore[union-attr]

    def _follow(
        self,
        examples: SingleExamples,
        outputs: Sequence[LayerOutput],
        leaves: Sequence[nn.Parameter],
        late: set[Any],
    ) -> None:
        edges: list[Any] = [*(GradientEdge(*edge) for out in outputs for edge in out.edges), *leaves]
        beside, uses = set(leaves), Counter(leaves)
        for output in outputs:
            uses.update(output.edges[0][0].record.params.values())
        others = {param for param, count in uses.items() if self.captured.calls[param] + (param in beside) > count}
        totals: dict[nn.Parameter, Tensor] = {}
        rows: dict[nn.Parameter, list[Tensor]] = {param: [] for param in others}
        whole = _by_parameter(outputs, leaves, examples.of_batch(edges))
        with examples.apart() as gradients:
            constant = dict(zip(leaves, gradients(None, edges)[len(edges) - len(leaves) :], strict=True))
            terms = [param for param, grad in constant.items() if grad is not None and bool(grad.any())]
            self._require_no_term(param for param in terms if param in late)
            for example in range(examples.num_examples):
                found = _by_parameter(outputs, leaves, gradients(example, edges))
                for param, value in found.items():
                    fixed = constant.get(param)
                    value = value if fixed is None else value - fixed
                    totals[param] = totals[param] + value if param in totals else value
                    if param in others:
                        rows[param].append(value)
                    else:
                        square = value.square()
                        self._squares[param] = self._squares[param] + square if param in self._squares else square
        fixed_by = {param: grad for param, grad in constant.items() if grad is not None}
        sums = {param: value + fixed_by[param] if param in fixed_by else value for param, value in totals.items()}
        self._require_equal(whole, sums)
        self._shared.update({param: torch.stack(values) for param, values in rows.items() if values})
        self.captured.calls.update(param for param in leaves if param in others)

    def _require_equal(self, whole: dict[nn.Parameter, Tensor], sums: dict[nn.Parameter, Tensor]) -> None:
        """Require gradients of single examples that add up to the gradient of the batch."""
        largest = max(float(grad.abs().max()) for grad in whole.values())  # a key's bias has no gradient but rounding
        off = [
            param
            for param, total in sums.items()
            if bool(whole[param].isfinite().all())
            and not torch.allclose(
                total, whole[param], rtol=1e-2, atol=1e-3 * float(whole[param].abs().max()) + 1e-6 * largest
            )
        ]
        if off:
            names = {param: name for name, param in self.captured.engine.model.named_parameters()}
            raise ExampleDimensionError(
                f"{names[off[0]]} is shared by all examples, whose gradients do not add up to its gradient: examples mix on "
                "the way to the loss, for instance by BatchNorm in training mode. Call .eval() on such layers, or "
                "freeze the parameter with requires_grad_(False)."
            )

    def _require_no_term(self, params: Iterable[nn.Parameter]) -> None:
        """Refuse terms such as ``log_sigma`` beside a mean: a part of each example's loss, or a penalty."""
        names = {param: name for name, param in self.captured.engine.model.named_parameters()}
        found = [names[param] for param in params]
        if found:
            raise UnsupportedTrainingError(
                f"{found[0]} is in a term of the loss that no example enters, so it may be part of each example's loss or a "
                "penalty. Add it to the examples before they are reduced, (squared_error / sigma**2 + log_sigma).mean(), or "
                f"leave it out. Parameters: {name_some(found, 160)}."
            )

    def _note_scale(self, grads: tuple[Tensor | None, ...]) -> None:
        if not self.captured.is_following and grads[0] is not None:
            self._scale = grads[0].detach()

    def finish(self) -> None:
        """Hand what was taken to the capture, in the scale of the loss that was differentiated."""
        if self._scale is None:
            return
        for param, square in self._squares.items():
            self.captured.add(param, square * self._scale**2)
        for param, contributions in self._shared.items():
            self.captured.add_shared(param, contributions * self._scale)
        self._squares, self._shared, self._scale = {}, {}, None

    def _warn(self, outputs: Sequence[LayerOutput], early: Sequence[nn.Parameter], num_examples: int) -> None:
        engine = self.captured.engine
        if engine.has_warned_of_loop or not (outputs or early):
            return
        engine.has_warned_of_loop = True
        names = {param: name for name, param in engine.model.named_parameters()}
        labels = [*dict.fromkeys(out.unit.label for out in outputs), *(names[param] for param in early)]
        warnings.warn(
            f"{name_some(labels, 200)}: all examples share these, so their curvature takes one backward pass for each of "
            f"the {num_examples} examples. It is exact, and slow. Expand their inputs to the batch, such as positions "
            "[batch, length], freeze them, or measure less often by curvature_interval.",
            stacklevel=2,
        )


def _by_parameter(
    outputs: Sequence[LayerOutput], leaves: Sequence[nn.Parameter], grads: Sequence[Tensor | None]
) -> dict[nn.Parameter, Tensor]:
    rest = iter(grads)
    found: dict[nn.Parameter, Tensor] = {}
    for output in outputs:
        node = output.edges[0][0]
        own = [next(rest) for _ in output.edges]
        if any(grad is not None for grad in own):
            with in_train_modes(node.record.modes):
                for param, grad in node.record.gradient(inputs_of(node), own).items():
                    found[param] = found[param] + grad if param in found else grad
    for leaf in leaves:
        grad = next(rest)
        grad = torch.zeros_like(leaf) if grad is None else grad
        found[leaf] = found[leaf] + grad if leaf in found else grad
    return found


def _late(reader: LossReader) -> set[Any]:
    """The parameters that enter the loss behind all layers."""
    return {node.variable for node in graph.in_order(reader.root, True) if graph.is_leaf(node)}
