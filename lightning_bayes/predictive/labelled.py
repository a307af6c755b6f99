"""Labelled batches of a network whose likelihood is known, with the targets that count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.errors import DataError
from lightning_bayes.likelihood import Categorical, Likelihood, ReadOutput, read_output
from lightning_bayes.likelihood.inputs import Arguments, arguments_of
from lightning_bayes.predictive.known_outputs import scored_call, the_output
from lightning_bayes.predictive.links import Link, link_of_kind
from lightning_bayes.predictive.samples import Samples


@final
class LabelledBatches:
    """Batches as the training step takes them, or pairs (inputs, targets), for repeated passes in evaluation mode.

    Where some targets do not count, those that do are the rows of outputs and targets.

    Attributes:
        link: Of the outputs.
    """

    def __init__(self, model: nn.Module, known: Likelihood, batches: Iterable[Any]) -> None:
        self._model, self._known, self._kind = model, known, the_output(known).kind
        given = [self._arguments(batch) for batch in batches]
        self._calls = [scored_call(model, known, arguments) for arguments, _ in given]
        self._read = [self._labels(call(), *labels) for call, (_, labels) in zip(self._calls, given, strict=True)]
        self._has_mask = any(read.mask is not None for read in self._read)
        self.link: Link = link_of_kind(self._kind)
        if self._has_mask and isinstance(self._kind, Categorical) and self._kind.is_logits:
            self.link = "softmax"

    def targets(self) -> Tensor:
        """All targets that count, on the CPU."""
        return torch.cat([self._rows(read.targets, read) for read in self._read])

    def outputs(self, draws: Samples) -> Tensor:
        """Outputs under each sample, ``[S, …]``, on the CPU."""
        found = [draws.outputs(self._model, call) for call in self._calls]
        if not self._has_mask:
            return torch.cat(found, 1).cpu()
        if isinstance(self._kind, Categorical):
            found = [each.movedim(self._kind.sampled_classes, -1) for each in found]
        by_sample = [[self._rows(one, read) for one in each] for each, read in zip(found, self._read, strict=True)]
        return torch.cat([torch.stack(rows) for rows in by_sample], 1)

    def _rows(self, values: Tensor, read: ReadOutput) -> Tensor:
        """Values ``[B, …]``, or of the targets that count."""
        if not self._has_mask:
            return values.cpu()
        mask = torch.ones_like(read.targets, dtype=torch.bool) if read.mask is None else read.mask
        return values[mask].cpu()

    def _arguments(self, batch: Any) -> tuple[Arguments, tuple[Any, bool]]:
        """The arguments of ``forward``; what holds the targets, and whether it is a pair."""
        is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor)
        if is_pair:
            return arguments_of(self._model.forward, batch[0], self._known.inputs), (batch, True)
        if self._known.inputs is None or not self._known.is_known:
            raise DataError(
                f"The loader yields a {type(batch).__name__}, of which nothing tells the inputs and targets. Let it yield "
                "pairs (inputs, targets) of tensors, or batches as in the fit."
            )
        return self._known.inputs.of(batch), (batch, False)

    def _labels(self, outputs: Any, batch: Any, is_pair: bool) -> ReadOutput:
        scored = the_output(self._known)
        path = (1,) if is_pair else scored.targets.path
        scored = replace(scored, paths=((),), targets=replace(scored.targets, path=path))
        return read_output(scored, outputs, batch)
