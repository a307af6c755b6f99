"""What the first training step of a fit tells: the likelihood of the outputs, and the noise of the targets."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_bayes.callbacks.validation_rows import rows_of
from lightning_bayes.likelihood import Likelihood
from lightning_bayes.likelihood.loss_functions import LossCall
from lightning_bayes.likelihood.module_outputs import Uncopied
from lightning_bayes.likelihood.record import StepRecorder
from lightning_bayes.predictive.recorded_noise import NoiseRecorder, RecordedNoise
from lightning_bayes.private_torch import tree_leaves


class LinkRecorder:
    """Records the likelihood of a training step, and the calls that score its targets."""

    def __init__(self, module: LightningModule) -> None:
        self._module, self._recorder, self._undo = module, StepRecorder(module), ExitStack()
        self.targets = torch.empty(0)  # of the batch, a pair (inputs, targets), before its step

    def start(self, batch: Any) -> None:
        """Record the steps of a batch from now on."""
        self.targets = batch[1].clone() if rows_of(batch) else torch.empty(0)
        weights = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        self._noise = NoiseRecorder(weights, tensors_of(batch))
        self._undo.callback(self._module.register_forward_hook(Uncopied(self._note_outputs)).remove)
        self._recorder.start(batch)
        self._undo.callback(self._recorder.stop)
        self._undo.enter_context(self._noise)

    def stop(self) -> None:
        """Record no longer, and forget."""
        self._undo.close()

    def noise(self, likelihood: Likelihood) -> RecordedNoise | None:
        """The noise that the loss gives the targets; None if its calls do not tell, as for a mixture written by hand."""
        found = self._noise.noise()
        has_classes = any(scored.kind.name == "categorical" for scored in likelihood.outputs)
        return None if has_classes and found is not None and found.family != "MixtureSameFamily" else found

    def calls(self, loss: Tensor) -> list[LossCall]:
        """The calls of loss functions that a loss depends on."""
        return self._recorder.calls(loss)

    def likelihood(self, loss: Tensor) -> Likelihood:
        """What a loss says about the module's outputs."""
        return self._recorder.likelihood(loss)

    def _note_outputs(self, module: Any, args: Any, output: Any) -> None:
        self._noise.tape.note_outputs(tensors_of(output))


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors of nested tuples, lists and dictionaries, in order."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
