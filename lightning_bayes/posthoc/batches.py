"""The forward pass of a batch with the targets that its loss scores, and the check that a network is in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.batch_norm import uses_batch_statistics
from lightning_bayes.errors import DataError, UnsupportedTrainingError, name_some
from lightning_bayes.likelihood import (
    Likelihood,
    OutputLikelihood,
    ReadOutput,
    ScoredOutput,
    labels_in,
    labels_of_pair,
)
from lightning_bayes.likelihood.scoring import shaped_mask
from lightning_bayes.posteriors.base import moved
from lightning_bayes.predictive import dropout_layers
from lightning_bayes.predictive.repeated import copied

Reader: TypeAlias = Callable[[Any], list[ReadOutput]]  # from a batch to the terms of its loss


class Term(NamedTuple):
    """The outputs and targets of one batch that a loss scores.

    Attributes:
        kind: The likelihood.
        outputs: One tensor, ``[B, …]``.
        targets: ``[B, …]``; arbitrary where they do not count.
        log_prob: Log p(y | f) of each target, without gradients.
        mask: Of the targets that count, in the shape of `log_prob`.
        weights: Of each target in the loss, beside those of its class; None if all are equal.
    """

    kind: OutputLikelihood
    outputs: Tensor
    targets: Tensor
    log_prob: Tensor
    mask: Tensor
    weights: Tensor | None

    @property
    def factors(self) -> Tensor:
        """What multiplies each target's loss: its weight, and 0 if it does not count."""
        own = self.mask.to(self.outputs.dtype)
        return own if self.weights is None else own * self.weights.reshape(own.shape).to(own.dtype)

    @property
    def nll(self) -> Tensor:
        """Negative log-likelihood summed over the targets that count, in float64."""
        return -self.log_prob.where(self.mask, 0.0).double().sum()

    @property
    def loss(self) -> Tensor:
        """The loss summed over targets with its weights, in float64."""
        losses = self.kind.losses(self.outputs.detach(), self.targets)
        return (losses.where(self.mask, 0.0) * self.factors).double().sum()


@final
class Reading:
    """The forward pass of one batch, which can be repeated; `term` is what the last call has read."""

    def __init__(self, read: Reader, batch: Any, kind: OutputLikelihood) -> None:
        self._read, self._batch, self._kind = read, batch, kind

    def __call__(self) -> Tensor:
        """The outputs that the loss scores, as one tensor with its graph."""
        terms = self._read(copied(self._batch))
        if len(terms) != 1:
            kinds = ", ".join(repr(term.scored.kind) for term in terms)
            raise UnsupportedTrainingError(
                f"The loss has {len(terms)} terms on the outputs ({kinds}), but Laplace measures the curvature of one: what "
                "weight they have as likelihoods is not known. Score one output with one loss function, or use VOGNCallback "
                "or SWAGCallback."
            )
        self.term = _term(self._kind, terms[0])
        return self.term.outputs


def _term(kind: OutputLikelihood, read: ReadOutput) -> Term:
    outputs, targets, mask = kind.joined(read.outputs), read.targets, read.mask
    bad = targets.isinf() if targets.is_floating_point() else torch.zeros((), dtype=torch.bool)
    if bool(bad.any()):
        raise DataError(f"{int(bad.sum())} of the {targets.numel()} targets of a batch are infinite. Look at the data.")
    log_prob = kind.log_prob(outputs.detach(), targets)
    mask = torch.ones_like(log_prob, dtype=torch.bool) if mask is None else shaped_mask(kind, mask, log_prob)
    return Term(kind, outputs, targets, log_prob, mask, read.weights)


def with_kind(likelihood: Likelihood | None, kind: OutputLikelihood) -> Likelihood:
    """The same output with a kind whose noise is chosen; without a likelihood, that of a network with one output."""
    only = ScoredOutput(((),), kind) if likelihood is None or likelihood.only is None else likelihood.only
    return replace(likelihood or Likelihood(), outputs=(replace(only, kind=kind),))


def reader(model: nn.Module, likelihood: Likelihood | OutputLikelihood) -> Reader:
    """Reads batches as a likelihood tells, or pairs (inputs, targets) of a network that returns one output."""
    if isinstance(likelihood, Likelihood):
        return lambda batch: labels_in(batch, likelihood).terms(model)
    of_pairs = Likelihood((ScoredOutput(((),), likelihood),))
    return lambda batch: labels_of_pair(model.forward, batch, of_pairs).terms(model)


def on_device(loader: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The batches of a loader on a device; a `DataError` if there is none."""
    is_empty = True
    for batch in loader:
        is_empty = False
        yield moved(batch, device)
    if is_empty:
        raise DataError("The loader yields no batch. Pass the training data, and a new loader if this was an iterator.")


def require_evaluation_mode(model: nn.Module) -> None:
    """Raise an `UnsupportedTrainingError` if BatchNorm or dropout is in training mode."""
    random = {module for module in dropout_layers(model) if module.training and getattr(module, "p", 1) > 0}
    unsupported = [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if uses_batch_statistics(module) or module in random
    ]
    if unsupported:
        raise UnsupportedTrainingError(
            f"{name_some(unsupported)} is in training mode, where outputs are random or depend on the other examples of the "
            "batch. Call model.eval() first; BatchNorm then uses its running statistics."
        )
