"""The link from outputs to predictions and the noise of the targets, from the record of a training loss."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_bayes.callbacks.validation_rows import rows_of
from lightning_bayes.curvature.layer_graph import nodes_behind
from lightning_bayes.curvature.loss import only
from lightning_bayes.curvature.loss_recorder import LossRecorder
from lightning_bayes.curvature.measured_modules import Uncopied
from lightning_bayes.likelihood.loss_functions import LossCall
from lightning_bayes.predictive import Link
from lightning_bayes.predictive.links import predicted
from lightning_bayes.predictive.recorded_noise import NoiseRecorder, RecordedNoise
from lightning_bayes.private_torch import output_shapes, tree_leaves

Shape: TypeAlias = tuple[int, ...]


class LinkRecorder:
    """Records the loss functions of a training step, and the outputs of the module's forward.

    A step that does not call the module's own forward uses the outputs of its submodules.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module, self._recorder, self._undo = module, LossRecorder(), ExitStack()
        self._own: dict[Any, Tensor] = {}  # the module's outputs, by autograd node
        self._inner: dict[Any, Shape] = {}  # of the submodules' outputs
        self.targets = torch.empty(0)  # of the batch, a pair (inputs, targets), before its step

    def start(self, batch: Any) -> None:
        """Record the steps of a batch from now on."""
        self.targets = batch[1].clone() if rows_of(batch) else torch.empty(0)
        weights = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        self._noise = NoiseRecorder(weights, tensors_of(batch))
        for module in self._module.modules():
            if isinstance(module, torch.jit.ScriptModule):  # which refuses hooks
                continue
            hook = module.register_forward_hook(Uncopied(self._note_outputs))
            self._undo.callback(hook.remove)
        self._undo.enter_context(self._recorder)
        self._undo.enter_context(self._noise)

    def stop(self) -> None:
        """Record no longer, and forget."""
        self._undo.close()
        for record in (self._recorder, self._own, self._inner):
            record.clear()

    def noise(self) -> RecordedNoise | None:
        """The noise that the loss gives the targets; None if its calls do not tell, as for a mixture written by hand."""
        found = self._noise.noise()
        has_classes = any("log_softmax" in known.notes for known in self._recorder.record.of.values())
        is_part = has_classes and found is not None and found.family != "MixtureSameFamily"
        return None if is_part else found

    def calls(self, loss: Tensor) -> list[LossCall]:
        """The calls of loss functions that a loss depends on."""
        found = (self._recorder.record.at(node) for node in nodes_behind([loss.grad_fn]))
        return [term.call for known in found for term in known.terms if term.call is not None]

    def link_of(self, loss: Tensor) -> Link | None:
        """The link of a loss on the module's outputs; None if the loss does not tell, or acts on other values."""
        record = self._recorder.read(loss)
        shapes = {node: tuple(output.shape) for node, output in self._own.items()} or self._inner
        if self._reaches(loss.grad_fn, shapes):
            return None
        links = {self._of_output(record.link, node, shapes) for node in record.linked}
        found: Link | None = only(links)
        return found

    def _note_outputs(self, module: Any, args: Any, output: Any) -> None:
        is_own, tensors = module is self._module, tensors_of(output)
        if is_own:
            self._noise.tape.note_outputs(tensors)
        for leaf in tensors:
            if leaf.dim() and leaf.grad_fn is not None:
                if is_own:
                    self._own[leaf.grad_fn] = leaf.detach()
                else:
                    self._inner[leaf.grad_fn] = tuple(leaf.shape)

    def _reaches(self, root: Any, shapes: dict[Any, Shape]) -> bool:
        """Whether outputs enter a loss beside its loss functions and log-probabilities, which then say nothing of them."""
        stack, seen = [root], {None}
        while stack:
            node = stack.pop()
            known = self._recorder.record.at(node)
            if node in seen or known.call is not None or "log_softmax" in known.notes:
                continue
            if node in shapes:
                return True
            seen.add(node)
            stack += [child for child, _ in node.next_functions]
        return False

    def _of_output(self, link: Link | None, linked: Any, shapes: dict[Any, Shape]) -> Link | None:
        """The link of the output that leads to a node by functions of it alone: no product of outputs, no further layer."""
        node, is_same = linked, True  # whether the loss gets values of the output itself
        while node is not None and node not in shapes:
            is_same &= "moved" in self._recorder.record.at(node).notes
            children = [child for child, _ in node.next_functions if child is not None]
            node = children[0] if len(set(children)) == 1 else None
        if node is None:
            return None if self._own else link
        if link is not None and node is not linked and self._is_undone(link, linked, node):
            return "identity"
        if link == "identity" and not is_same:
            return None
        return _with_class_dim(shapes[node], output_shapes(linked)[0]) if link == "softmax" else link

    def _is_undone(self, link: Link, linked: Any, node: Any) -> bool:
        """Whether an output holds the means already, as probabilities whose log the loss takes."""
        terms = (term for known in self._recorder.record.of.values() for term in known.terms)
        values = [term.call.outputs for term in terms if term.call and term.call.outputs.grad_fn is linked]
        output = self._own.get(node)
        if not values or output is None or output.numel() != values[0].numel() or values[0].dim() < 2:
            return False
        means = predicted(values[0].detach()[None], link)[0]
        orders = (means, means.movedim(1, -1))
        return any(torch.allclose(m.reshape(output.shape), output.to(m), rtol=1e-2, atol=1e-6) for m in orders)


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors of nested tuples, lists and dictionaries, in order."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _with_class_dim(output: Shape, of_loss: Shape) -> Link | None:
    """The softmax over the dimension of an output that holds the classes of a loss; None if several or none may."""
    if len(output) < 3 or output == of_loss:
        return "softmax"
    classes = of_loss[min(1, len(of_loss) - 1)]
    dims = [dim for dim in range(1, len(output)) if output[dim] == classes]
    names: dict[int, Link] = {1: "softmax", len(output) - 1: "softmax_last"}
    return names.get(dims[0]) if len(dims) == 1 else None
