"""What `LaplaceCallback` knows of the targets: the recorded likelihood, and how to read batches with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, final

import torch
from lightning.pytorch import LightningModule

from lightning_bayes.callbacks.batch_reader import BatchReader, recorded_likelihood
from lightning_bayes.errors import HyperparameterError, UnsupportedTrainingError
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
        recorded: What the fit recorded, completed by the module's link; empty without a fit, or if the loss does not tell.
        argument: The argument ``likelihood``.
        batches: Training batches, of which the first is read where nothing is recorded.

    Returns:
        A likelihood of one output.

    Raises:
        HyperparameterError: If nothing tells the likelihood, or the loss scores several outputs.
        UnsupportedTrainingError: If the loss is not the likelihood of its targets, such as a focal loss.
    """
    if recorded.inputs is None and not recorded.outputs:
        recorded = next((recorded_likelihood(module, batch) for batch in batches), recorded)
    attribute = getattr(module, LIKELIHOOD_ATTRIBUTE, None)
    known = _stated(recorded, argument if argument is not None else attribute)
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


def _stated(recorded: Likelihood, stated: LinkArgument | None) -> Likelihood:
    """The recorded value with a stated kind, which may complete it, or give a function its curvature."""
    if stated is None:
        return recorded
    kind: OutputLikelihood = find_kind(stated, "likelihood")
    if recorded.only is not None and isinstance(recorded.only.kind, Family):
        return replace(recorded, outputs=(replace(recorded.only, kind=kind),))
    return recorded.completed(kind)


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
        terms = [] if self._reads_pairs else self._of_step(batch).terms
        if self._reads_pairs is None:
            self._reads_pairs = not terms
        if self._reads_pairs:
            return self._of_pair(batch)
        return terms[:1] if self._is_stated and _are_one(terms) else terms


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
