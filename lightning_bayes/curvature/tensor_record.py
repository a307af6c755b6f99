"""What is known about the tensors of a forward pass, by autograd node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, final

from torch.autograd.function import BackwardCFunction

from lightning_bayes.curvature.loss_terms import Step, Term, Value
from lightning_bayes.likelihood.example_dims import Selection
from lightning_bayes.likelihood.loss_functions import LossCall

# moved        the values are those of the input, elsewhere or in another dtype
# scatter      rows written to positions that a tensor chooses
# pack         rows of packed sequences
# join         a stack or a concatenation
# lookup       rows of a table, which no gradient ties to the examples that chose them
# batch_norm   normalised by statistics of the batch
# log_softmax  log-probabilities of classes
# weighted     values with constant factors or masks
Note: TypeAlias = Literal["moved", "scatter", "pack", "join", "lookup", "batch_norm", "log_softmax", "weighted"]


@dataclass(eq=False)
class Recorded:
    """What is known about one tensor."""

    terms: tuple[Term, ...] = ()  # of a value that loss functions or reductions made
    selection: Selection | None = None  # the operation that selected its rows
    factor: Step | None = None  # the product with a number that it is
    notes: set[Note] = field(default_factory=set)
    value: Value | None = None  # with terms

    @property
    def call(self) -> LossCall | None:
        """The call of a loss function that it is the result of."""
        return self.terms[0].call if len(self.terms) == 1 and not self.terms[0].steps else None

    @property
    def is_of_losses(self) -> bool:
        """Whether it is made by a loss function, or log-probabilities of classes."""
        return "log_softmax" in self.notes or any(term.call for term in self.terms)


_NOTHING: Final = Recorded()


@final
@dataclass(eq=False)
class TensorRecord:
    """What is known about tensors, by their node, or by the tensor itself for data."""

    of: dict[Any, Recorded] = field(default_factory=dict)

    def at(self, node: Any) -> Recorded:
        """What is known about the tensor of a node."""
        return self.of.get(node, _NOTHING)

    def noted(self, note: Note, nodes: Iterable[Any]) -> Iterator[Any]:
        """Those nodes that have a note."""
        return (node for node in nodes if note in self.at(node).notes)

    def node_of(self, value: Value) -> Any:
        """The node that computed a value, before Functions that return it as it is, as DistributedDataParallel's does."""
        stack: list[Any] = [] if value.grad_fn in self.of else [value.grad_fn]
        while stack:
            node = stack.pop()
            known = self.at(node).value
            if known is not None and known.tensor is not None and known.tensor.data_ptr() == value.pointer:
                return node
            if isinstance(node, BackwardCFunction):
                stack += [child for child, _ in node.next_functions]
        return value.grad_fn

    def terms_of(self, value: Any) -> tuple[Term, ...]:
        """The terms of a recorded value; empty if it is not recorded."""
        return self.at(self.node_of(value)).terms if isinstance(value, Value) else ()

    def all_terms(self, value: Any) -> tuple[Term, ...]:
        """The terms of a recorded value, the value itself as a term, or none for a constant."""
        has_graph = isinstance(value, Value) and value.requires_grad
        return self.terms_of(value) or ((Term.of(value),) if has_graph else ())

    def note(self, value: Value, *notes: Note) -> Recorded:
        """What is known about a tensor, to be completed."""
        recorded = self.of.setdefault(value.tensor if value.grad_fn is None else value.grad_fn, Recorded())
        recorded.notes.update(notes)
        return recorded

    def note_path(self, value: Value, input: Value, note: Note) -> None:
        """Note the nodes between a value and its input too: torch 2.5 indexes one dimension after the other."""
        path, node = list[Any](), value.grad_fn
        while node is not None and node is not input.grad_fn and len(node.next_functions) == 1:
            path.append(node)
            node = node.next_functions[0][0]
        for between in path[1:] if node is input.grad_fn else ():
            self.of.setdefault(between, Recorded()).notes.add(note)

    def put(self, value: Value, terms: tuple[Term, ...], step: Step | None = None) -> None:
        """Record the terms of a value, after one more step."""
        recorded = self.note(value)
        recorded.terms = terms if step is None else tuple(term.then(step) for term in terms)
        recorded.value = value
