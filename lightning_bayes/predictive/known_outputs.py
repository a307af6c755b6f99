"""What is known of a network's outputs where a posterior predicts: stated, or recorded with the posterior."""

from __future__ import annotations

import warnings
from typing import Any, Final

from torch import nn

from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.likelihood import Likelihood, LinkArgument, Raw, ScoredOutput, find_kind, leaf_at
from lightning_bayes.likelihood.inputs import Arguments, arguments_of
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive.repeated import Repeatable

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
    """A repeatable call of a network on inputs as its training step passed them, which returns the scored output."""
    return scored_call(model, likelihood, arguments_of(model.forward, x, likelihood.inputs))


def scored_call(model: nn.Module, likelihood: Likelihood, arguments: Arguments) -> Repeatable:
    """A repeatable call of a network, which returns the scored output."""
    paths = the_output(likelihood).paths

    def output(*args: Any, **kwargs: Any) -> Any:
        result = model(*args, **kwargs)
        found = tuple(leaf_at(result, path) for path in paths)
        return found if len(paths) > 1 else found[0]

    return Repeatable(model if paths == ((),) else output, *arguments[0], **arguments[1])
