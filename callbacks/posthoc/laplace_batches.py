"""What `LaplaceCallback` knows of the targets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule

from lightning_bayes.callbacks.trainer.batch_reader import recorded_likelihood
from lightning_bayes.callbacks.trainer.stated_likelihood import LIKELIHOOD_ATTRIBUTE, stated_by
from lightning_bayes.errors import BayesError, HyperparameterError, UnsupportedTrainingError
from lightning_bayes.likelihood import (
    Family,
    Likelihood,
    LinkArgument,
    OutputLikelihood,
    Raw,
    find_kind,
)


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
        The likelihood of each scored output.

    Raises:
        HyperparameterError: If nothing tells the likelihood of an output.
        UnsupportedTrainingError: If the loss is not the likelihood of its targets, such as a focal loss.
    """
    stated = stated_likelihood(module, argument)
    if recorded.inputs is None and not recorded.outputs:
        recorded = _of_first(module, batches, is_stated=stated is not None)
    known = recorded if len(recorded.outputs) > 1 else _completed(recorded, stated)
    name = type(module).__name__
    raw = [scored.kind for scored in known.outputs if isinstance(scored.kind, Raw)]
    if not known.outputs or raw:
        why = "; ".join(kind.why for kind in raw if kind.why)
        raise HyperparameterError(
            f"LaplaceCallback does not know the likelihood of the targets: the training loss of {name} does not tell"
            f"{f' ({why})' if why else ''}. Pass likelihood='classification', 'binary', 'multilabel', 'regression' or "
            "'counts'."
        )
    function = next((scored.kind for scored in known.outputs if scored.departs == "function"), None)
    if function is not None and argument is None:
        raise UnsupportedTrainingError(
            f"The loss of {name} multiplies the log-probabilities of its targets by a function of the outputs, as a focal "
            f"loss does, so it is not their likelihood. Pass likelihood={function.name!r} to fit the posterior of "
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
