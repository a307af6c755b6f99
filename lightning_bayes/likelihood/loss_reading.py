"""The terms of a loss: which call of a loss function scores which output of a network.

A call belongs to the outputs whose positions its values read (`positions`), also through a ``log_softmax``. An output that
enters the loss in another way as well, or a call that takes another function of it, says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.likelihood.calls import CallRecorder, LogProbs, NotedCall
from lightning_bayes.likelihood.categorical import Categorical
from lightning_bayes.likelihood.gaussian_calls import gaussian_term
from lightning_bayes.likelihood.module_outputs import Leaf
from lightning_bayes.likelihood.positions import Edge, Positions, edge_of, nearest, positions_in
from lightning_bayes.likelihood.terms import (
    Scale,
    Term,
    categorical,
    class_layout,
    kind_of,
    layout_of,
    relation_of,
    term_of,
)

Found: TypeAlias = Iterator[tuple[Edge, Term | None]]  # an output and its term; None if the call tells nothing of it


class _Outputs(NamedTuple):
    """Outputs of a step."""

    leaves: Mapping[Edge, Leaf]
    has_own: bool  # whether they are those of the module's own ``forward``

    def under(self, values: Tensor) -> Iterator[tuple[Edge, Leaf, Positions | None]]:
        """The outputs that some values are computed from, and where they read them; values of a bare step are an output."""
        hit = [(edge, self.leaves[edge]) for edge in nearest(edge_of(values), self.leaves)]
        found = [(edge, leaf, positions_in(values, leaf.value)) for edge, leaf in hit]
        if not self.has_own and all(positions is None for _, _, positions in found):
            found = [(edge_of(values), Leaf((), values), positions_in(values, values))]
        yield from found


def terms_of(loss: Tensor, leaves: Sequence[Leaf], calls: CallRecorder, has_own: bool = True) -> list[Term]:
    """The terms of a loss on outputs, of which it tells everything."""
    outputs = _Outputs({edge_of(leaf.value): leaf for leaf in leaves}, has_own)
    reached = nearest(edge_of(loss), {*outputs.leaves, *calls.losses, *calls.log_probs})
    unknown, terms = {edge for edge in reached if edge in outputs.leaves}, list[Term]()
    for noted in (noted for edge, noted in calls.losses.items() if edge in reached):
        for edge, term in _of_call(noted, outputs, calls, _scale(loss, noted.result, outputs)):
            unknown, terms = (unknown | {edge}, terms) if term is None else (unknown, [*terms, term])
    for through in (through for edge, through in calls.log_probs.items() if edge in reached - unknown):
        for edge, term in _of_log_probs(through, outputs, _scale(loss, through.values, outputs)):
            unknown, terms = (unknown | {edge}, terms) if term is None else (unknown, [*terms, term])
    return [term for term in terms if not any(edge_of(leaf.value) in unknown for leaf in term.leaves)]


def _scale(loss: Tensor, result: Tensor, outputs: _Outputs) -> Scale:
    """How a loss takes the result of a call."""
    if edge_of(loss) == edge_of(result):
        return Scale(torch.ones_like(result))
    (gradient,) = torch.autograd.grad(loss, result, create_graph=True, retain_graph=True)
    is_function = gradient.grad_fn is not None and bool(nearest(edge_of(gradient), outputs.leaves))
    return Scale(gradient.detach(), is_function)


def _of_call(noted: NotedCall, outputs: _Outputs, calls: CallRecorder, scale: Scale) -> Found:
    """The terms of a call on the outputs that it takes."""
    call = noted.call
    hit = nearest(edge_of(call.outputs), {*outputs.leaves, *calls.log_probs})
    through = [calls.log_probs[edge] for edge in hit if edge not in outputs.leaves]
    if len(through) == len(hit) == 1 and call.known.of_log_probs:
        yield from _through_log_probs(noted, through[0], outputs, scale)
        return
    for edge, leaf, positions in outputs.under(call.outputs):
        layout = None if positions is None else layout_of(call, positions)
        if positions is None or layout is None:
            yield edge, None
        elif call.function is F.gaussian_nll_loss:
            yield edge, gaussian_term(call, leaf, positions, list(outputs.leaves.values()), scale)
        else:
            kind = kind_of(call, relation_of(call.outputs, leaf.value, positions), layout)
            yield edge, None if kind is None else term_of(call, leaf, kind, layout, scale)


def _through_log_probs(noted: NotedCall, through: LogProbs, outputs: _Outputs, scale: Scale) -> Found:
    """The terms of a call that takes log-probabilities of outputs; those of `F.nll_loss` show their targets."""
    call, moved = noted.call, positions_in(noted.call.outputs, through.values)
    for edge, leaf, positions in outputs.under(through.logits):
        layout = None if positions is None else class_layout(through.values.shape, positions, through.dim)
        if layout is None or not layout.dim or positions is None:
            yield edge, None
            continue
        of_call = None
        if call.function is F.nll_loss and moved is not None:
            of_call = class_layout(call.outputs.shape, moved.after(positions))
        kind = categorical(call, layout.dim)
        assert kind is not None
        yield edge, Term((leaf,), kind) if of_call is None else term_of(call, leaf, kind, of_call, scale)


def _of_log_probs(through: LogProbs, outputs: _Outputs, scale: Scale) -> Found:
    """The terms of log-probabilities that a step weighs by hand: their weights in the loss are the targets."""
    weights = -scale.gradient.movedim(through.dim, -1)
    total = weights.sum(-1)
    probs = (weights / total.unsqueeze(-1)).nan_to_num().reshape(-1, weights.shape[-1])
    for edge, leaf, positions in outputs.under(through.logits):
        layout = None if positions is None else class_layout(through.values.shape, positions, through.dim)
        if layout is None or not layout.dim:
            yield edge, None
            continue
        kind = Categorical(layout.dim)
        if scale.is_function or bool((weights < 0).any()):
            yield edge, Term((leaf,), kind, departs="function" if scale.is_function else "weights")
            continue
        mask, of_rows = layout.read & (layout.moved(total) != 0), probs[layout.rows.clamp_min(0)]
        is_hard = bool((of_rows.amax(-1)[mask] > 1 - 1e-4).all())
        targets = of_rows.argmax(-1) if is_hard else of_rows.movedim(-1, layout.dim)
        yield edge, Term((leaf,), kind, targets, None if bool(mask.all()) else mask)
