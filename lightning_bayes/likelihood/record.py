"""`StepRecorder`: the likelihood of a training step, from its calls of loss functions and gradients of what they take."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.likelihood.batches import Labels, ReadOutput
from lightning_bayes.likelihood.calls import CallRecorder
from lightning_bayes.likelihood.inputs import Inputs
from lightning_bayes.likelihood.loss_functions import LossCall
from lightning_bayes.likelihood.loss_reading import terms_of
from lightning_bayes.likelihood.module_outputs import Leaf, ModuleOutputs
from lightning_bayes.likelihood.paths import Path, entries
from lightning_bayes.likelihood.positions import edge_of, nearest
from lightning_bayes.likelihood.targets import targets_of
from lightning_bayes.likelihood.terms import Term, joint_kind
from lightning_bayes.likelihood.value import Departs, Likelihood, ScoredOutput, Targets
from lightning_bayes.private_torch import version_of, without_torch_functions


@final
class StepRecorder:
    """Records one training step of a module between `start` and `stop`."""

    def __init__(self, module: nn.Module) -> None:
        self._outputs, self._calls = ModuleOutputs(module), CallRecorder()
        self._entries = list[tuple[Path, Any, int]]()  # of the batch, with their versions

    def start(self, batch: Any) -> None:
        """Record the step on a batch from now on."""
        self._entries = [(path, value, _version(value)) for path, value in entries(batch)]
        self._outputs.start()
        self._calls.__enter__()

    def stop(self) -> None:
        """Record no longer, and forget the step."""
        self._calls.__exit__(None, None, None)
        self._calls.clear()
        self._outputs.stop()
        self._entries.clear()

    @property
    def inputs(self) -> Inputs | None:
        """How the step calls ``forward``; None if it does not, or with an argument that it has computed."""
        found = self._outputs.arguments
        return None if found is None else Inputs.found(*found, [(path, value) for path, value, _ in self._entries])

    def calls(self, loss: Tensor) -> list[LossCall]:
        """The calls of loss functions that a loss depends on."""
        reached = nearest(edge_of(loss), self._calls.losses)
        return [noted.call for edge, noted in self._calls.losses.items() if edge in reached]

    def likelihood(self, loss: Tensor) -> Likelihood:
        """What a loss says about the outputs."""
        scored = [self._scored(terms) for terms in self._by_output(loss)]
        return Likelihood(tuple(each for each in scored if each is not None), self.inputs)

    def read(self, loss: Tensor) -> Labels:
        """The arguments, outputs, targets and masks of the step, without terms whose targets the loss does not show."""
        groups = [terms for terms in self._by_output(loss) if self._scored(terms) is not None]
        read = [self._read(term) for terms in groups for term in terms if term.targets is not None]
        return Labels(self._outputs.arguments, None, (), read)

    def _by_output(self, loss: Tensor) -> list[list[Term]]:
        """The terms of each output."""
        with without_torch_functions(), torch.enable_grad(), _backpack_left_alone():
            terms = terms_of(loss, self._outputs.leaves, self._calls, has_own=self._outputs.is_own)
        return [list(group) for _, group in groupby(sorted(terms, key=_name), _name)]

    def _scored(self, terms: list[Term]) -> ScoredOutput | None:
        """The terms of one output as one; None if they contradict each other."""
        first, kind = terms[0], joint_kind([term.kind for term in terms])
        if kind is None:
            return None
        departs: Departs = next((term.departs for term in terms if term.departs), "")
        targets = self._targets(first) if len(terms) == 1 else Targets()
        return ScoredOutput(tuple(leaf.path for leaf in first.leaves), kind, targets, departs)

    def _targets(self, term: Term) -> Targets:
        """Where the batch holds the targets of a term, unless the step has changed the entry in place."""
        with without_torch_functions(), torch.no_grad():
            found = [(path, value) for path, value, version in self._entries if _version(value) == version]
            return targets_of(term, [Leaf(path, value) for path, value in found if isinstance(value, Tensor)])

    def _read(self, term: Term) -> ReadOutput:
        scored, values = self._scored([term]), tuple(leaf.value for leaf in term.leaves)
        assert scored is not None
        assert term.targets is not None
        targets = term.targets
        if term.mask is not None and term.mask.shape == targets.shape:  # a void class is no class
            targets = torch.where(term.mask, targets, torch.zeros_like(targets))
        return ReadOutput(scored, values if len(values) > 1 else values[0], targets, term.mask, term.weights)


def _backpack_left_alone() -> AbstractContextManager[Any]:
    """Context in which BackPACK's hooks on modules, if there are any, do nothing and forget nothing."""
    backpack = sys.modules.get("backpack")
    return nullcontext() if backpack is None else backpack.backpack(retain_graph=True)


def _version(value: Any) -> int:
    return version_of(value) if isinstance(value, Tensor) and not value.is_inference() else 0


def _name(term: Term) -> str:
    return str(tuple(leaf.path for leaf in term.leaves))
