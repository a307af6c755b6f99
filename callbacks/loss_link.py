"""The link from outputs to predictions and the noise of the targets, from the record of a training loss."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_bayes.curvature.loss_recorder import LossRecorder
from lightning_bayes.predictive import Link
from lightning_bayes.predictive.recorded_noise import NoiseRecorder, RecordedNoise
from lightning_bayes.private_torch import tree_leaves


class LinkRecorder:
    """Records the loss functions of a training step, and the outputs of the module's forward."""

    def __init__(self, module: LightningModule) -> None:
        self._module, self._recorder, self._undo = module, LossRecorder(), ExitStack()
        self._outputs: set[Any] = set()  # autograd nodes

    def start(self, batch: Any) -> None:
        """Record the steps of a batch from now on."""
        weights = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        self._noise = NoiseRecorder(weights, tensors_of(batch))
        hook = self._module.register_forward_hook(self._note_outputs)
        self._undo.callback(hook.remove)
        self._undo.enter_context(self._recorder)
        self._undo.enter_context(self._noise)

    def stop(self) -> None:
        """Record no longer, and forget."""
        self._undo.close()
        self._recorder.clear()
        self._outputs.clear()

    def noise(self) -> RecordedNoise | None:
        """The noise that the loss gives the targets; None if its calls do not tell."""
        return self._noise.noise()

    def link_of(self, loss: Tensor) -> Link | None:
        """The link of a loss on the module's outputs; None if the loss does not tell, or acts on other values."""
        record = self._recorder.read(loss)
        if self._outputs and not all(map(self._is_output, record.linked)):
            return None
        return record.link

    def _note_outputs(self, module: LightningModule, args: Any, output: Any) -> None:
        self._noise.tape.note_outputs(tensors_of(output))
        leaves = [leaf for leaf in tensors_of(output) if leaf.dim()]
        self._outputs.update(leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None)

    def _is_output(self, node: Any) -> bool:
        """Whether functions of the outputs alone lead to a node: no product of outputs, and no further layer."""
        while node is not None and node not in self._outputs:
            children = [child for child, _ in node.next_functions if child is not None]
            node = children[0] if len(set(children)) == 1 else None
        return node is not None


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors of nested tuples, lists and dictionaries, in order."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
