"""The targets of a batch beside the outputs that the loss scores, in the layout of the outputs.

`labels_in` needs a batch that tells its targets (`Targets.is_known`). Where only the training step can tell, the callbacks
run the step and return the same `Labels`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lightning_bayes.errors import DataError
from lightning_bayes.likelihood.categorical import Categorical
from lightning_bayes.likelihood.inputs import Arguments, arguments_of
from lightning_bayes.likelihood.paths import leaf_at, leaves
from lightning_bayes.likelihood.value import Likelihood, ScoredOutput, Targets

_ABSENT: Final = (LookupError, AttributeError, TypeError)  # what a batch without an entry raises


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

    @property
    def counted(self) -> Tensor:
        """Whether each target counts, in the shape of `targets`."""
        return torch.ones_like(self.targets, dtype=torch.bool) if self.mask is None else self.mask


class Labels(NamedTuple):
    """A batch as the training step takes it, before ``forward`` is called.

    Attributes:
        arguments: Of ``forward``, positional and keyword; None if the step that was run does not call it.
        batch: As the training loader yields it.
        scored: The terms of the loss.
        of_step: The terms of a step that was run, with their graph; None where the batch tells them.
    """

    arguments: Arguments | None
    batch: Any
    scored: tuple[ScoredOutput, ...]
    of_step: list[ReadOutput] | None = None

    def terms(self, forward: Callable[..., Any]) -> list[ReadOutput]:
        """The terms of the step, or of a call of ``forward``."""
        if self.of_step is not None:
            return self.of_step
        assert self.arguments is not None
        output = forward(*self.arguments[0], **self.arguments[1])
        return [read_output(scored, scored.parts_of(output), self.batch) for scored in self.scored]

    def read(self, outputs: Any) -> ReadOutput:
        """The only term, from the outputs that it takes."""
        terms = (
            [read_output(scored, outputs, self.batch) for scored in self.scored]
            if self.of_step is None
            else self.of_step
        )
        if len(terms) != 1:
            raise DataError(f"The training loss has {len(terms)} terms on a batch, of which one is needed.")
        return terms[0]


def labels_in(batch: Any, likelihood: Likelihood) -> Labels:
    """Where a batch holds the arguments of ``forward`` and the targets of each output that the loss scores.

    Args:
        batch: As the training loader yields it.
        likelihood: What the loss says about the outputs.

    Returns:
        The arguments, and where the targets are.

    Raises:
        DataError: If only the training step can tell an argument of ``forward`` or the targets, or if the batch lacks them.
    """
    if likelihood.inputs is None or not likelihood.is_known:
        raise DataError(
            "Only the training step tells the inputs or the targets of this network. Use a callback, or pass pairs "
            "(inputs, targets) as the loss takes them."
        )
    try:
        arguments = likelihood.inputs.of(batch)
        for scored in likelihood.outputs:
            leaf_at(batch, scored.targets.path or ())
    except _ABSENT as error:
        raise DataError(
            f"The batch, a {type(batch).__name__}, lacks inputs or targets of the training step."
        ) from error
    return Labels(arguments, batch, likelihood.outputs)


def labels_of_pair(forward: Callable[..., Any], batch: Any, likelihood: Likelihood) -> Labels:
    """`labels_in` a pair (inputs, targets) as the loss takes them, of a network with one scored output."""
    scored = likelihood.only
    if not is_pair(batch) or scored is None:
        raise DataError(
            f"The loader yields a {type(batch).__name__}, of which nothing tells the inputs and targets. Let it yield "
            "pairs (inputs, targets) of tensors, or batches as in the fit."
        )
    scored = replace(scored, targets=Targets((1,), scored.targets.ignored))
    return Labels(arguments_of(forward, batch[0], likelihood.inputs), batch, (scored,))


def is_pair(batch: Any) -> bool:
    """Whether a batch is a pair (inputs, targets)."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor)


def read_output(scored: ScoredOutput, outputs: Any, batch: Any) -> ReadOutput:
    """The targets of one term of a loss, of which the batch tells those that count, beside the outputs that it takes."""
    assert scored.targets.path is not None
    try:
        targets = leaf_at(batch, scored.targets.path).to(next(leaf.device for _, leaf in leaves(outputs)))
    except _ABSENT as error:
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
