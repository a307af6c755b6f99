"""The targets of a batch beside the outputs that the loss scores, in the layout of the outputs.

`read_batch` needs a batch that tells its targets (`Targets.is_known`). Where only the training step can tell, the callbacks
run the step and return the same `ReadOutput`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bayes.errors import DataError
from lightning_bayes.likelihood.paths import leaf_at
from lightning_bayes.likelihood.value import Likelihood, ScoredOutput


class ReadOutput(NamedTuple):
    """One term of a loss on one batch.

    Attributes:
        scored: The term.
        outputs: The output of ``forward`` at its path, as ``forward`` returned it; a tuple for several paths.
        targets: In the layout of the outputs without their classes, ``[B, …]``; arbitrary where they do not count.
        mask: Whether each target counts, in the shape of `targets`; None if all do.
        weights: Of each target in the loss, in the shape of `targets`; None if all are equal.
    """

    scored: ScoredOutput
    outputs: Any
    targets: Tensor
    mask: Tensor | None = None
    weights: Tensor | None = None


def read_batch(forward: Callable[..., Any], batch: Any, likelihood: Likelihood) -> list[ReadOutput]:
    """Call ``forward`` on a batch as the training step does, and read the targets of each output that the loss scores.

    Args:
        forward: The network, or a module's ``forward``.
        batch: As the training loader yields it.
        likelihood: What the loss says about the outputs.

    Returns:
        One entry for each term of the loss.

    Raises:
        DataError: If only the training step can tell an argument of ``forward`` or the targets, or if the batch lacks them.
    """
    if likelihood.inputs is None or not all(scored.targets.is_known for scored in likelihood.outputs):
        raise DataError(
            "Only the training step tells the inputs or the targets of this network. Use a callback, or pass pairs "
            "(inputs, targets) as the loss takes them."
        )
    args, kwargs = likelihood.inputs.of(batch)
    output = forward(*args, **kwargs)
    return [read_output(scored, output, batch) for scored in likelihood.outputs]


def read_output(scored: ScoredOutput, output: Any, batch: Any) -> ReadOutput:
    """The targets of one term of a loss, of which the batch tells those that count."""
    assert scored.targets.path is not None
    found = tuple(leaf_at(output, path) for path in scored.paths)
    outputs = found if len(found) > 1 else found[0]
    targets = leaf_at(batch, scored.targets.path).to(found[0].device)
    targets = targets.reshape(scored.kind.target_shape(outputs, targets))
    ignored = scored.targets.ignored
    if ignored is None:
        return ReadOutput(scored, outputs, targets)
    mask = ~targets.isnan() if ignored != ignored else targets != ignored
    return ReadOutput(scored, outputs, torch.where(mask, targets, torch.zeros_like(targets)), mask)
