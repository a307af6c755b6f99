"""The targets of a batch beside the outputs that the loss scores, in the layout of the outputs.

`read_batch` needs a batch that tells its targets (`Targets.is_known`). Where only the training step can tell, the callbacks
run the step and return the same `ReadBatch`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bayes.errors import DataError
from lightning_bayes.likelihood.categorical import Categorical
from lightning_bayes.likelihood.inputs import Arguments
from lightning_bayes.likelihood.paths import leaf_at, leaves
from lightning_bayes.likelihood.value import Likelihood, ScoredOutput


class ReadOutput(NamedTuple):
    """One term of a loss on one batch.

    Attributes:
        scored: The term.
        outputs: The output of ``forward`` at its path, as ``forward`` returned it; a tuple for several paths.
        targets: In the layout of the outputs without their classes, ``[B, …]``; arbitrary where they do not count.
        mask: Whether each target counts, in the shape of `targets`; None if all do.
        weights: Of each target in the loss, in the shape of `targets`, with the mean 1; None if all are equal. The weights
            of classes and labels are the kind's.
    """

    scored: ScoredOutput
    outputs: Any
    targets: Tensor
    mask: Tensor | None = None
    weights: Tensor | None = None


class ReadBatch(NamedTuple):
    """One batch as the training step takes it.

    Attributes:
        arguments: Of ``forward``, positional and keyword.
        output: What ``forward`` returned.
        terms: Of the loss.
    """

    arguments: Arguments
    output: Any
    terms: list[ReadOutput]


def read_batch(forward: Callable[..., Any], batch: Any, likelihood: Likelihood) -> ReadBatch:
    """Call ``forward`` on a batch as the training step does, and read the targets of each output that the loss scores.

    Args:
        forward: The network, or a module's ``forward``.
        batch: As the training loader yields it.
        likelihood: What the loss says about the outputs.

    Returns:
        The arguments, the output, and one entry for each term of the loss.

    Raises:
        DataError: If only the training step can tell an argument of ``forward`` or the targets, or if the batch lacks them.
    """
    if likelihood.inputs is None or not likelihood.is_known:
        raise DataError(
            "Only the training step tells the inputs or the targets of this network. Use a callback, or pass pairs "
            "(inputs, targets) as the loss takes them."
        )
    arguments = likelihood.inputs.of(batch)
    output = forward(*arguments[0], **arguments[1])
    return ReadBatch(arguments, output, [read_output(scored, output, batch) for scored in likelihood.outputs])


def read_output(scored: ScoredOutput, output: Any, batch: Any) -> ReadOutput:
    """The targets of one term of a loss, of which the batch tells those that count."""
    assert scored.targets.path is not None
    found = tuple(leaf_at(output, path) for path in scored.paths)
    outputs = found if len(found) > 1 else found[0]
    try:
        targets = leaf_at(batch, scored.targets.path).to(next(leaf.device for _, leaf in leaves(outputs)))
    except (LookupError, AttributeError, TypeError) as error:
        raise DataError(
            f"The batch has no targets at {scored.targets.path}, where the training loss took them."
        ) from error
    targets = targets.reshape(scored.kind.target_shape(outputs, targets))
    mask = counted(scored, outputs, targets)
    if bool(mask.all()):
        return ReadOutput(scored, outputs, targets)
    return ReadOutput(scored, outputs, torch.where(mask, targets, torch.zeros_like(targets)), mask)


def counted(scored: ScoredOutput, outputs: Any, targets: Tensor) -> Tensor:
    """Whether targets count: those that are not ignored, not nan, and among the classes, without which no loss is finite."""
    ignored = scored.targets.ignored
    mask = torch.ones_like(targets, dtype=torch.bool) if ignored is None else targets != ignored
    if targets.is_floating_point():
        mask &= ~targets.isnan()
    elif isinstance(scored.kind, Categorical):
        mask &= (targets >= 0) & (targets < outputs.shape[scored.kind.classes])
    return mask
