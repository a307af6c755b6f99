"""The scored outputs and the targets of labelled batches, for repeated passes under samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.likelihood import Labels, Likelihood, ReadOutput
from lightning_bayes.likelihood.paths import mapped
from lightning_bayes.predictive.known_outputs import scored_call, the_output
from lightning_bayes.predictive.samples import Samples


@final
class LabelledBatches:
    """Batches whose targets are known, of a network in evaluation mode with one scored output.

    Batches of several sizes, such as tokens of sequences, are filled up with targets that do not count.

    Args:
        model: The network.
        known: The likelihood of its output.
        batches: Their arguments and targets.
    """

    def __init__(self, model: nn.Module, known: Likelihood, batches: Iterable[Labels]) -> None:
        self._model, self._kind, self._batches = model, the_output(known).kind, list(batches)
        if any(batch.arguments is None for batch in self._batches):
            raise UnsupportedTrainingError(
                f"The training step of {type(model).__name__} does not call self(...), so its outputs cannot be computed "
                "again. Call self(...) in it."
            )
        self._calls = [scored_call(model, known, batch.arguments or ((), {})) for batch in self._batches]
        self._read: list[ReadOutput] = []

    def outputs(self, samples: Samples) -> Tensor:
        """Outputs under each sample, ``[S, B, …]``, on the CPU in at least single precision."""
        found = [samples.outputs(self._model, call) for call in self._calls]
        if not self._read:
            self._read = [self._labels(each, batch) for each, batch in zip(found, self._batches, strict=True)]
        return _joined([self._kind.joined(each).cpu() for each in found], 1)

    @property
    def targets(self) -> Tensor:
        """All targets, ``[B, …]``, once `outputs` has laid them out."""
        return _joined([read.targets.cpu() for read in self._read], 0)

    @property
    def counted(self) -> Tensor | None:
        """Whether each target counts; None if all do."""
        counted = _joined([read.counted.cpu() for read in self._read], 0)
        return None if bool(counted.all()) else counted

    def _labels(self, outputs: Any, batch: Labels) -> ReadOutput:
        """The term of a batch, from its scored outputs."""
        return batch.read(mapped(lambda leaf: leaf[0], outputs))


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors as one along a dimension, filled with zeros where the others differ."""
    sizes = [max(part.shape[d] for part in parts) for d in range(parts[0].dim())]

    def filled(part: Tensor) -> Tensor:
        missing = [0 if d == dim else sizes[d] - part.shape[d] for d in range(part.dim())]
        return F.pad(part, [n for each in reversed(missing) for n in (0, each)]) if any(missing) else part

    return torch.cat([filled(part) for part in parts], dim)
