"""What `LaplaceCallback` knows of the targets: the recorded likelihood, and how to read batches with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, final

import torch
from lightning.pytorch import LightningModule

from lightning_bayes.callbacks.trainer.batch_reader import BatchReader, recorded_likelihood
from lightning_bayes.callbacks.trainer.stated_likelihood import stated_by
from lightning_bayes.errors import BayesError, HyperparameterError, UnsupportedTrainingError
from lightning_bayes.likelihood import (
    Family,
    Likelihood,
    LinkArgument,
    OutputLikelihood,
    Raw,
    ReadOutput,
    find_kind,
)
from lightning_bayes.posthoc.batches import pairs

LIKELIHOOD_ATTRIBUTE = "lightning_bayes_likelihood"  # of modules that state it


def known_likelihood(
    module: LightningModule, recorded: Likelihood, argument: LinkArgument | None, batches: Iterable[Any]
) -> Likelihood:
    """The likelihood of the training loss, completed by the argument or the module's attribute.

    Args:
        module: The user's module.
        recorded: What the fit recorded; empty without a fit, or if the loss does not tell.
        argument: The argument ``likelihood``.
        batches: Training batches; where nothing is recorded, the training step runs on the first.

    Returns:
        A likelihood of one output.

    Raises:
        HyperparameterError: If nothing tells the likelihood, or the loss scores several outputs.
        UnsupportedTrainingError: If the loss is not the likelihood of its targets, such as a focal loss.
    """
    stated = stated_likelihood(module, argument)
    if recorded.inputs is None and not recorded.outputs:
        recorded = _of_first(module, batches, is_stated=stated is not None)
    known = recorded if len(recorded.outputs) > 1 else _completed(recorded, stated)
    name = type(module).__name__
    if not known.outputs or all(isinstance(scored.kind, Raw) for scored in known.outputs):
        why = "; ".join(scored.kind.why for scored in known.outputs if isinstance(scored.kind, Raw) and scored.kind.why)
        raise HyperparameterError(
            f"LaplaceCallback does not know the likelihood of the targets: the training loss of {name} does not tell"
            f"{f' ({why})' if why else ''}. Pass likelihood='classification', 'binary', 'multilabel', 'regression' or "
            "'counts'."
        )
    if known.only is None:
        paths = ", ".join(str(scored.paths) for scored in known.outputs)
        raise HyperparameterError(
            f"The training loss of {name} scores several outputs ({paths}), but Laplace measures the curvature of one, "
            "because their relative weight as likelihoods is not known. Use VOGNCallback or SWAGCallback."
        )
    if known.only.departs == "function" and argument is None:
        raise UnsupportedTrainingError(
            f"The loss of {name} multiplies the log-probabilities of its targets by a function of the outputs, as a focal "
            f"loss does, so it is not their likelihood. Pass likelihood={known.only.kind.name!r} to fit the posterior of "
            "the likelihood alone, or use VOGNCallback, SWAGCallback or DeepEnsembleCallback."
        )
    return known


def stated_likelihood(module: LightningModule, argument: LinkArgument | None) -> OutputLikelihood | None:
    """The kind that the argument states, else one of the module's attributes."""
    stated = getattr(module, LIKELIHOOD_ATTRIBUTE, None) if argument is None else argument
    return stated_by(module) if stated is None else find_kind(stated, "likelihood")


def _of_first(module: LightningModule, batches: Iterable[Any], is_stated: bool) -> Likelihood:
    """What the training step tells on the first batch; nothing if it cannot be run and the user states the likelihood."""
    for batch in batches:
        try:
            return recorded_likelihood(module, batch)
        except BayesError:
            if not is_stated:
                raise
            break
    return Likelihood()


def _completed(recorded: Likelihood, stated: OutputLikelihood | None) -> Likelihood:
    """The recorded value with a stated kind, which may complete it, or give a function its curvature."""
    if recorded.only is not None and stated is not None and isinstance(recorded.only.kind, Family):
        return replace(recorded, outputs=(replace(recorded.only, kind=stated),))
    return recorded.completed(stated)


@final
class TermReader:
    """Reads the term of the loss on a batch; pairs (inputs, targets) where the step does not tell it.

    Args:
        module: The user's module.
        likelihood: Of one output.
        is_stated: Whether the user states the kind: several terms that score the same targets are then one.
    """

    def __init__(self, module: LightningModule, likelihood: Likelihood, is_stated: bool) -> None:
        assert likelihood.only is not None
        self._of_step, self._of_pair = BatchReader(module, likelihood), pairs(module, likelihood.only.kind)
        self._is_stated = is_stated
        self._reads_pairs: bool | None = None  # until the first batch tells

    def __call__(self, batch: Any) -> list[ReadOutput]:
        """The terms of the loss on a batch."""
        terms = [] if self._reads_pairs else self._of_loss(batch)
        if self._reads_pairs is None:
            self._reads_pairs = not terms
        if self._reads_pairs:
            return self._of_pair(batch)
        return terms[:1] if self._is_stated and _are_one(terms) else terms

    def _of_loss(self, batch: Any) -> list[ReadOutput]:
        """The terms that the step tells; none if it cannot be run and the user states the likelihood."""
        try:
            return self._of_step(batch).terms
        except BayesError:
            if self._is_stated and self._reads_pairs is None:
                return []
            raise


def _are_one(terms: list[ReadOutput]) -> bool:
    """Whether terms of a loss score the same targets of the same output."""
    first, others = terms[0], terms[1:]
    return all(
        other.outputs is first.outputs
        and torch.equal(other.targets, first.targets)
        and torch.equal(_counted(other), _counted(first))
        for other in others
    )


def _counted(term: ReadOutput) -> torch.Tensor:
    return torch.ones_like(term.targets, dtype=torch.bool) if term.mask is None else term.mask
