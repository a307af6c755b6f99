"""What is known of a network's outputs where a posterior predicts: stated, or recorded with the posterior."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

from torch import nn

from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.likelihood import (
    Family,
    Likelihood,
    LinkArgument,
    OutputLikelihood,
    Raw,
    ScoredOutput,
    find_kind,
    leaf_at,
    with_leaf,
)
from lightning_bayes.likelihood.inputs import Arguments, arguments_of
from lightning_bayes.likelihood.paths import leaves
from lightning_bayes.likelihood.predictions import AnyPrediction
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive.averages import OutputAverage
from lightning_bayes.predictive.nested import Differing
from lightning_bayes.predictive.repeated import Repeatable
from lightning_bayes.predictive.samples import Samples, require_tensor

UNKNOWN: Final = (
    "{} does not tell how outputs become predictions, so the raw outputs are averaged. Pass "
    "link='classification', 'binary', 'regression' or 'counts'; 'mean_variance' or 'mean_log_variance' for networks that "
    "return both; or a function from outputs to a torch.distributions."
)


def known_outputs(
    posterior: AbstractPosterior, link: LinkArgument | Likelihood | None, stacklevel: int = 3
) -> Likelihood:
    """The likelihood of a posterior, completed by a stated link; of raw outputs, with a warning, if nothing is known."""
    known = told_outputs(posterior, link)
    if known is None:
        warnings.warn(UNKNOWN.format("The posterior"), stacklevel=stacklevel)
        return Likelihood((ScoredOutput(((),), Raw()),), getattr(posterior.likelihood, "inputs", None))
    return known


def told_outputs(posterior: AbstractPosterior, link: LinkArgument | Likelihood | None) -> Likelihood | None:
    """What is stated of the outputs, or told by the posterior; None if nothing is known."""
    if isinstance(link, Likelihood):
        return link
    recorded: Likelihood = posterior.likelihood or Likelihood()
    known = recorded.completed(None if link is None else find_kind(link))
    return known if known.outputs else None


def the_output(likelihood: Likelihood) -> ScoredOutput:
    """The only output that a likelihood tells of."""
    if likelihood.only is None:
        names = ", ".join(str(scored.paths) for scored in likelihood.outputs)
        raise UnsupportedTrainingError(f"The training loss scores several outputs ({names}); predict with a callback.")
    return likelihood.only


def called(model: nn.Module, likelihood: Likelihood, x: Any) -> Repeatable:
    """A repeatable call on inputs as the training step passed them: of the only scored output, or of all if several are."""
    arguments = arguments_of(model.forward, x, likelihood.inputs)
    if likelihood.only is None:
        return Repeatable(model, *arguments[0], **arguments[1])
    return scored_call(model, likelihood, arguments)


def scored_call(model: nn.Module, likelihood: Likelihood, arguments: Arguments) -> Repeatable:
    """A repeatable call of a network, which returns the scored output."""
    scored = the_output(likelihood)

    def output(*args: Any, **kwargs: Any) -> Any:
        return scored.parts_of(model(*args, **kwargs))

    return Repeatable(model if scored.paths == ((),) else output, *arguments[0], **arguments[1])


def kind_of_outputs(likelihood: Likelihood) -> OutputLikelihood:
    """The kind of the only term of the loss; that of raw outputs for several."""
    return Raw() if likelihood.only is None else likelihood.only.kind


def predicted(
    model: nn.Module,
    samples: Samples,
    likelihood: Likelihood,
    call: Repeatable,
    temperature: float,
    convert: Callable[[AnyPrediction, OutputLikelihood], Any] = lambda prediction, kind: prediction,
) -> Any:
    """The prediction under samples of what the loss scores; for several outputs, one for each in their structure."""
    outputs, only = samples.outputs(model, call), likelihood.only
    if only is not None:
        if only.paths == ((),) and not isinstance(only.kind, Family):
            outputs = require_tensor(model, outputs)
        return convert(only.kind.summarise(outputs if temperature == 1 else outputs / temperature), only.kind)
    average = OutputAverage(likelihood, temperature)
    result = average.predicted(average.tempered(outputs), convert)
    for path, leaf in leaves(result):
        if isinstance(leaf, Differing):
            result = with_leaf(result, path, leaf_at(call(), path))  # of the mean network
    return result
