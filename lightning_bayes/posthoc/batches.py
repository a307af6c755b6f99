"""The forward pass of a batch with the targets that its loss scores, and the check that a network is in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Generator, Tensor, nn

from lightning_bayes.curvature.measured_modules import find_measured_modules
from lightning_bayes.curvature.output_roots import Columns, CurvatureName, root_columns
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
from lightning_bayes.likelihood.positions import Edge, edge_of, nearest
from lightning_bayes.likelihood.scoring import shaped_mask
from lightning_bayes.posteriors.base import moved
from lightning_bayes.predictive import dropout_layers
from lightning_bayes.predictive.repeated import copied
from lightning_bayes.private_torch import tree_leaves

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
    """The forward pass of one batch, which can be repeated; `terms` are what the last call has read, one for each kind."""

    def __init__(self, read: Reader, batch: Any, kinds: Sequence[OutputLikelihood]) -> None:
        self._read, self._batch, self._kinds = read, batch, kinds
        self.terms = list[Term]()

    def __call__(self) -> Tensor:
        """The outputs that the loss scores, as one tensor with its graph; `[B, …]`, or `[B, K]` of several."""
        read = self._read(copied(self._batch))
        if len(read) != len(self._kinds):
            kinds = ", ".join(repr(term.scored.kind) for term in read)
            raise UnsupportedTrainingError(
                f"The loss has {len(read)} terms on the outputs ({kinds}), but {len(self._kinds)} are expected: what weight "
                "several terms on an output have as likelihoods is not known. Score each output with one loss function, or "
                "use VOGNCallback or SWAGCallback."
            )
        self.terms = [_term(kind, each) for kind, each in zip(self._kinds, read, strict=True)]
        return self.joined([term.outputs for term in self.terms])

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """Values of the outputs of each term as one tensor, beside each other for several terms."""
        return values[0] if len(values) == 1 else torch.cat([each.flatten(1) for each in values], 1)

    def split(self, values: Tensor) -> list[Tensor]:
        """What `joined` has joined."""
        if len(self.terms) == 1:
            return [values]
        shapes = [term.outputs.shape for term in self.terms]
        parts = torch.split(values, [shape[1:].numel() for shape in shapes], 1)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def columns(self, curvature: CurvatureName, mc_samples: int, generator: Generator) -> Columns:
        """Roots of the curvature: block by block for several terms, whose targets are independent given the outputs."""

        def columns(outputs: Tensor) -> Iterator[Tensor]:
            parts = self.split(outputs)
            found = [
                root_columns(curvature, term.kind, term.targets, mc_samples, generator, term.factors)(part)
                for term, part in zip(self.terms, parts, strict=True)
            ]
            # In the empirical Fisher, the gradient of an example is that of all its targets.
            if len(parts) == 1 or curvature == "empirical_fisher":
                yield from map(self.joined, zip(*found, strict=True))
                return
            zeros = [torch.zeros_like(part, requires_grad=False) for part in parts]
            for index, of_term in enumerate(found):
                yield from (self.joined([*zeros[:index], column, *zeros[index + 1 :]]) for column in of_term)

        return columns

    @property
    def counted(self) -> Tensor | None:
        """1 for each output that a target that counts scores, else 0; None if all targets count."""
        if all(bool(term.mask.all()) for term in self.terms):
            return None
        return self.joined([t.kind.over_outputs(t.mask.to(t.outputs.dtype), t.outputs) for t in self.terms])


def _term(kind: OutputLikelihood, read: ReadOutput) -> Term:
    outputs, targets, mask = kind.joined(read.outputs), read.targets, read.mask
    bad = targets.isinf() if targets.is_floating_point() else torch.zeros((), dtype=torch.bool)
    if bool(bad.any()):
        raise DataError(f"{int(bad.sum())} of the {targets.numel()} targets of a batch are infinite. Look at the data.")
    log_prob = kind.log_prob(outputs.detach(), targets)
    mask = torch.ones_like(log_prob, dtype=torch.bool) if mask is None else shaped_mask(kind, mask, log_prob)
    return Term(kind, outputs, targets, log_prob, mask, read.weights)


def with_kinds(likelihood: Likelihood | None, kinds: Sequence[OutputLikelihood]) -> Likelihood:
    """The same outputs with kinds whose noise is chosen; without a likelihood, that of a network with one output."""
    scored = likelihood.outputs if likelihood is not None and likelihood.outputs else (ScoredOutput(((),), kinds[0]),)
    outputs = tuple(replace(each, kind=kind) for each, kind in zip(scored, kinds, strict=True))
    return replace(likelihood or Likelihood(), outputs=outputs)


def layers_before_outputs(model: nn.Module, reading: Reading) -> set[str]:
    """Names of the layers that scored outputs are computed from without another layer between."""
    names: dict[Edge, str] = {}

    def note(output: Any, name: str) -> None:
        names.update((edge_of(leaf), name) for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn)

    with ExitStack() as hooks, torch.enable_grad():
        for unit in find_measured_modules(model):
            hook = partial(lambda name, _, args, output: note(output, name), unit.name)
            hooks.callback(unit.module.register_forward_hook(hook).remove)
        reading()
    return {names[edge] for term in reading.terms for edge in nearest(edge_of(term.outputs), names)}


def reader(model: nn.Module, likelihood: Likelihood | OutputLikelihood) -> Reader:
    """Reads batches as a likelihood tells, or pairs (inputs, targets) of a network that returns one output."""
    if isinstance(likelihood, Likelihood):
        return lambda batch: labels_in(batch, likelihood).terms(model)
    of_pairs = Likelihood((ScoredOutput(((),), likelihood),))
    return lambda batch: labels_of_pair(model.forward, batch, of_pairs).terms(model)


def on_device(loader: Iterable[Any], model: nn.Module) -> Iterator[Any]:
    """The batches of a loader on the device of a network; a `DataError` if there is none."""
    is_empty, device = True, next(model.parameters()).device
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
