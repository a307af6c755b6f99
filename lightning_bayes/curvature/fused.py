"""The fused engine: squares by this package's rules, for any layer, and by a loop over the examples where no rule fits.

If all examples share the output of a layer (position embeddings, relative-position tables), or if a parameter is used
outside of its layer, its gradient is already a sum over the batch. So the loop runs one backward per example:

    c_i = ∂L/∂v_i · ∂v_i/∂θ

This is exact. It needs as many backward passes as the batch has examples; each stops at these parameters.
"""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.engine import AbstractEngine
from lightning_bayes.curvature.hooks import HookedCapture
from lightning_bayes.curvature.layer_calls import as_in_forward
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.measured_modules import refuse_scripted
from lightning_bayes.curvature.operands import Operands
from lightning_bayes.curvature.parameters import changes_refused
from lightning_bayes.curvature.single_examples import SingleExamples
from lightning_bayes.curvature.tape import Tape
from lightning_bayes.curvature.workspace import DEFAULT_MIB
from lightning_bayes.errors import ExampleDimensionError, UnsupportedTrainingError, name_some
from lightning_bayes.likelihood.module_outputs import Uncopied
from lightning_bayes.private_torch import gradient_hooks, has_children


class HookedEngine(AbstractEngine, ABC):
    """Watches the calls of measured modules during a capture. Arguments as in `AbstractEngine`."""

    def __init__(
        self, model: nn.Module, loss_reduction: LossReduction = "auto", workspace_mib: float = DEFAULT_MIB
    ) -> None:
        super().__init__(model, loss_reduction, workspace_mib)
        refuse_scripted(model)

    @contextmanager
    def run(self, captured: HookedCapture) -> Iterator[Any]:
        """Measure the passes inside the context with an empty capture; its squares are complete on exit."""
        units = captured.plan.units
        measured = {unit.module for unit in units}
        outermost = [self.model, *(self.model.children() if hasattr(self.model, "training_step") else ())]
        with ExitStack() as undo:
            undo.callback(captured.drop_nodes)
            for unit in units:
                captured.watch(unit, undo)
            if any(gradient_hooks(param) for unit in units for param in unit.params.values()):
                undo.enter_context(changes_refused(units))
            if operands := [unit for unit in units if unit.at_operations]:
                undo.enter_context(Operands(operands, captured.on_gradients, captured.recorded, captured.sizes, self))
            captured.tape = undo.enter_context(Tape())
            record = Uncopied(captured.note_model_call)
            for module in outermost:
                is_scripted = isinstance(module, torch.jit.ScriptModule)  # which refuses hooks
                is_outer = module is self.model or (has_children(module) and not is_scripted)
                if module not in measured and is_outer:
                    undo.callback(module.register_forward_hook(record, with_kwargs=True).remove)
            yield captured
            if captured.shared:
                captured.finish()
            captured.squares |= {p: torch.zeros_like(p) for p in captured.without_gradient - captured.squares.keys()}
            check = captured.running_check
            if check is not None and check.passes(captured.trained(), captured.squares, captured.is_half):
                captured.plan.checked_once.add(tuple(captured.sizes))


@final
class FusedEngine(HookedEngine):
    """Measures per-example squared gradients; the default engine. Arguments as in `AbstractEngine`."""

    def capture(self, *, left_out: Collection[nn.Parameter] = ()) -> AbstractContextManager[Capture]:
        """Measure the passes inside the context."""
        return self.run(FusedCapture(self, left_out))


@final
class FusedCapture(HookedCapture):
    """Per-example squared gradients of one pass."""

    can_loop = at_operations = True

    def loop(self, loss: Tensor, params: set[nn.Parameter]) -> None:
        """Measure parameters by a loop over the examples."""
        ExampleLoop(self).run(loss, params)

    @override
    def measure_losses(self, losses: Tensor) -> None:
        loss = self.reader.reduced(losses, self.scale.reduction)
        outputs = self._unreached()
        self.handle_layouts(loss, self._placed(outputs, self._find_layouts(loss, outputs, len(losses))))
        with self.left_alone():
            self.measuring_backward(loss, self.trained().values())
        self.stores_backward, self.has_taken_examples = False, True
        if self.running_check is not None:
            self.running_check.hooks.close()
            self.running_check = None


class ExampleLoop:
    """Computes contributions to parameters from one loss, one example at a time."""

    def __init__(self, captured: HookedCapture) -> None:
        self.captured = captured
        self._squares: dict[nn.Parameter, Tensor] = {}  # Σ_i c_i², on the scale of the observed loss
        self._names = {param: name for name, param in captured.engine.model.named_parameters()}

    def run(self, loss: Tensor, params: Collection[nn.Parameter]) -> None:
        """Compute the contributions to parameters; those that it cannot measure stay `Capture.unmeasured`."""
        captured, n = self.captured, self.captured.known_batch_size
        leaves = [param for param in self._names if param in params]
        examples = captured.single_examples(loss, leaves)
        if examples is None:
            captured.unmeasured.update(leaves)
            return
        with captured.following(), as_in_forward((), loss.device.type), torch.no_grad():
            self._follow(examples, leaves)
        captured.looped.update(self._squares)
        if n != 1:
            self._warn(examples.num_examples)
        if self._squares:
            loss.grad_fn.register_prehook(self._pass_on)  # type: ignore[union-attr]

    def _follow(self, examples: SingleExamples, leaves: Sequence[nn.Parameter]) -> None:
        """Run one backward per example, and add up the squares of the contributions."""
        sums: list[Tensor | float] = [0.0 for _ in leaves]
        squares: list[Tensor | float] = [0.0 for _ in leaves]
        with examples.separated(skips_norms=False) as gradients:
            # Gradients of the terms that depend on no example, such as a penalty on the weights. Those of a learned
            # factor's parameters, such as the logarithm of a scale, normalise the loss of each example.
            apart = gradients(torch.zeros(examples.num_examples, dtype=torch.bool))
            constant = list(apart)
            scaled = examples.of_factors(torch.ones(examples.num_examples, dtype=torch.bool))
            for index in [index for index, grad in enumerate(scaled) if grad is not None]:
                own, constant[index] = apart[index], None
                apart[index] = None if own is None else own * (1 - 1 / examples.num_examples)
            for chosen in torch.eye(examples.num_examples, dtype=torch.bool):
                for index, grad in enumerate(gradients(chosen)):
                    own = apart[index]
                    if grad is not None:
                        value = grad if own is None else grad - own
                        sums[index], squares[index] = sums[index] + value, squares[index] + value.square()
        batch = examples.of_batch()
        self._require_equal(leaves, batch, constant, sums)
        for param, grad, own, square in zip(leaves, batch, constant, squares, strict=True):
            is_of_layer = param in self.captured.calls.keys() - self.captured.of_step and bool(
                torch.as_tensor(square).any()
            )
            if own is not None and bool(own.any()) and not is_of_layer:
                self._refuse_term(param)
            if grad is not None:
                self._squares[param] = torch.zeros_like(param) if isinstance(square, float) else square

    def _require_equal(
        self,
        leaves: Sequence[nn.Parameter],
        batch: Sequence[Tensor | None],
        constant: Sequence[Tensor | None],
        sums: Sequence[Tensor | float],
    ) -> None:
        """Require per-example gradients that add up to the batch gradient."""
        largest = max((float(grad.abs().max()) for grad in batch if grad is not None), default=0.0)
        for param, grad, own, total in zip(leaves, batch, constant, sums, strict=True):
            if grad is None or not bool(grad.isfinite().all()):
                continue
            found = torch.as_tensor(total if own is None else total + own, dtype=grad.dtype, device=grad.device)
            # The term in `largest` allows for parameters whose gradient is only rounding, such as an attention key's bias.
            atol = 1e-3 * float(grad.abs().max()) + 1e-6 * largest
            if not torch.allclose(found.expand_as(grad), grad, rtol=1e-2, atol=atol):
                raise ExampleDimensionError(
                    f"{self._names[param]} is shared by all examples, but the per-example gradients do not add up to its "
                    'gradient. Return the per-example losses as well: {"loss": loss, "per_example_loss": losses}; or freeze '
                    "the parameter with requires_grad_(False)."
                )

    def _refuse_term(self, param: nn.Parameter) -> NoReturn:
        """Refuse a factor of the loss, or a term such as ``log_sigma``: part of each example's loss, or a penalty."""
        raise UnsupportedTrainingError(
            f"{self._names[param]} is in a term of the loss that depends on no example, so it may be part of each "
            "example's loss or a penalty. Use it in the per-example losses before the reduction, as in (squared_error / "
            "sigma**2 + log_sigma).mean(), or remove it."
        )

    def _pass_on(self, grads: tuple[Tensor | None, ...]) -> None:
        """Prehook of the loss: pass the squares to the capture, on the scale of the loss that is differentiated."""
        if grads[0] is None or not self.captured.should_measure(self._squares):
            return
        for param, square in self._squares.items():
            if param in self.captured.squares:
                raise UnsupportedTrainingError(
                    f"A second loss of one pass reached {self._names[param]}, whose contributions need one backward pass "
                    "for each example. Add the losses and call backward once, or open one pass for each backward."
                )
            self.captured.add(param, square * grads[0].detach() ** 2)
        self._squares.clear()  # the loss, and with it this hook, may outlive the pass

    def _warn(self, num_examples: int) -> None:
        engine = self.captured.engine
        if engine.has_warned_of_loop or not self._squares or self.captured.is_replanned:
            return
        engine.has_warned_of_loop = True
        warnings.warn(
            f"{name_some([self._names[param] for param in self._squares], 200)}: all examples share these, or "
            f"no layer rule covers their use, so their curvature needs one backward pass for each of the {num_examples} "
            "examples, which is exact but slow. Expand their inputs to the batch, such as positions [batch, length], move "
            "them into a layer, freeze them, or measure less often with curvature_interval.",
            stacklevel=2,
        )
