"""Calls of `F.gaussian_nll_loss`: the mean is an output, and so may be the variance, in a form that its values tell."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.likelihood.gaussian import Gaussian
from lightning_bayes.likelihood.loss_functions import LossCall
from lightning_bayes.likelihood.module_outputs import Leaf
from lightning_bayes.likelihood.positions import Edge, Positions, edge_of, nearest, positions_in
from lightning_bayes.likelihood.predicted_gaussian import PredictedGaussian, form_of
from lightning_bayes.likelihood.raw import Raw
from lightning_bayes.likelihood.terms import Layout, Scale, Term, relation_of, term_of


def gaussian_term(call: LossCall, leaf: Leaf, mean: Positions, leaves: list[Leaf], scale: Scale) -> Term | None:
    """The term of a call whose mean is (a part of) an output; None if the mean is another function of it."""
    if relation_of(call.outputs, leaf.value, mean) != "same":
        return None
    layout = Layout(mean.numbers, mean.read)
    variance = torch.as_tensor(call.options["var"], dtype=call.outputs.dtype, device=call.outputs.device)
    by_edge: dict[Edge, Leaf] = {edge_of(each.value): each for each in leaves}
    hit = [by_edge[edge] for edge in nearest(edge_of(variance), by_edge)] if variance.requires_grad else []
    if not hit:
        return term_of(call, leaf, _stated(variance), layout, scale)
    if len(hit) > 1 or variance.shape != call.outputs.shape:
        return term_of(call, leaf, Raw(_OTHER), layout, scale)
    found = positions_in(variance, hit[0].value)
    if hit[0] is leaf:
        return _in_halves(call, leaf, mean, found, variance, scale)
    is_beside = found is not None and torch.equal(found.numbers, mean.numbers)
    form = form_of(hit[0].value.detach(), _beside(variance, found, hit[0])) if found is not None and is_beside else None
    if form is None:
        return term_of(call, leaf, Raw(_OTHER), layout, scale)
    return term_of(call, leaf, PredictedGaussian(form), layout, scale)._replace(leaves=(leaf, hit[0]))


_OTHER = "the loss takes a variance that is another function of the outputs than a known form of one of them"


def _stated(variance: Tensor) -> Gaussian:
    """A Gaussian with a constant variance; a learned one, or one of each example, is not known."""
    is_one = variance.numel() > 0 and bool((variance == variance.flatten()[0]).all())
    return Gaussian(float(variance.flatten()[0].sqrt()) if is_one and not variance.requires_grad else None)


def _in_halves(
    call: LossCall, leaf: Leaf, mean: Positions, found: Positions | None, variance: Tensor, scale: Scale
) -> Term:
    """The term of an output ``[…, 2 k]`` that holds the means and then what states the variances."""
    width = leaf.value.shape[-1]
    first, second = (
        (None, None) if found is None else (mean.numbers[..., : width // 2], found.numbers[..., width // 2 :])
    )
    form = None
    if (
        first is not None
        and second is not None
        and width % 2 == 0
        and torch.equal(first, second)
        and bool((first >= 0).all())
    ):
        half = leaf.value.detach()[..., width // 2 :]
        form = form_of(half, variance.detach().flatten()[second])
    if form is None or first is None:
        return term_of(call, leaf, Raw(_OTHER), Layout(mean.numbers, mean.read), scale)
    rows = first.squeeze(-1) if width == 2 else first
    return term_of(call, leaf, PredictedGaussian(form), Layout(rows, rows >= 0), scale)


def _beside(variance: Tensor, found: Positions, leaf: Leaf) -> Tensor:
    return found.moved(variance.detach()).reshape(leaf.value.shape)
