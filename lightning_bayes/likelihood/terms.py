"""One call of a loss function as a term of a likelihood: its kind, and its targets in the layout of the output it scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.likelihood.base import OutputLikelihood
from lightning_bayes.likelihood.bernoulli import Bernoulli
from lightning_bayes.likelihood.categorical import Categorical
from lightning_bayes.likelihood.gaussian import Gaussian
from lightning_bayes.likelihood.loss_functions import LossCall
from lightning_bayes.likelihood.module_outputs import Leaf
from lightning_bayes.likelihood.poisson import Poisson
from lightning_bayes.likelihood.positions import Positions
from lightning_bayes.likelihood.raw import Raw
from lightning_bayes.likelihood.value import Departs

Relation: TypeAlias = Literal["same", "log", "logit", "exp", "sigmoid", "scaled"]  # of values to the output they read


class Scale(NamedTuple):
    """How a loss takes the result of a call: ∂L/∂result, and whether that is a function of the outputs."""

    gradient: Tensor
    is_function: bool = False


class Term(NamedTuple):
    """A term of the loss of one batch. Targets, mask and weights are in the layout of the output, without its classes."""

    leaves: tuple[Leaf, ...]
    kind: OutputLikelihood
    targets: Tensor | None = None  # None if the loss does not show them
    mask: Tensor | None = None  # of the targets that count
    weights: Tensor | None = None
    departs: Departs = ""
    ignored: float | None = None  # by the call


class Layout(NamedTuple):
    """Where the targets of a call stand in an output."""

    rows: Tensor  # number of the target that each position is scored with, without the dimension of the classes
    read: Tensor  # whether there is one
    dim: int | None = None  # of the classes in the output

    def moved(self, values: Tensor) -> Tensor:
        """Values of the call's targets in the layout of the output."""
        return values.flatten()[self.rows.clamp_min(0)]


def class_layout(shape: Sequence[int], positions: Positions, of_classes: int | None = None) -> Layout | None:
    """The layout of class logits ``[N, C, …]`` in an output; None if no one dimension of it holds the classes.

    Args:
        shape: Of the logits.
        positions: Of the logits in the output.
        of_classes: The dimension of the classes in the logits; None is the second, as loss functions take it.

    Returns:
        Where the rows of the logits stand.
    """
    dim_of = min(1, len(shape) - 1) if of_classes is None else of_classes
    classes, stride = shape[dim_of], math.prod(shape[dim_of + 1 :])
    numbers, read = positions.numbers, positions.read
    of_class = numbers.div(stride, rounding_mode="floor") % classes
    rows = numbers.div(classes * stride, rounding_mode="floor") * stride + numbers % stride
    for dim in range(min(1, numbers.dim() - 1), numbers.dim()):
        expected = torch.arange(classes, device=numbers.device).view(-1, *(1 for _ in numbers.shape[dim + 1 :]))
        if numbers.shape[dim] == classes and bool(((of_class == expected) | ~read).all()):
            whole = read.all(dim)
            name = -1 if dim == numbers.dim() - 1 > 1 else dim
            return Layout(rows.select(dim, 0), whole, name) if whole.equal(read.any(dim)) else None
    return None


def layout_of(call: LossCall, positions: Positions) -> Layout | None:
    """The layout of a call's targets in an output."""
    if call.known.has_classes:
        return class_layout(call.outputs.shape, positions)
    return Layout(positions.numbers, positions.read)


def relation_of(values: Tensor, output: Tensor, positions: Positions) -> Relation | None:
    """How the values that a loss takes follow from the output."""
    read = positions.read
    given, own = (each.detach().double() for each in (positions.moved(values)[read], output[read]))
    tolerance = {"rtol": 1e-2 if min(values.element_size(), output.element_size()) < 4 else 1e-4, "atol": 1e-6}
    tests: dict[Relation, Callable[[], tuple[Tensor, Tensor]]] = {
        "same": lambda: (given, own),
        "log": lambda: (given.exp(), own),
        "logit": lambda: (given.sigmoid(), own),
        "exp": lambda: (given, own.exp()),
        "sigmoid": lambda: (given, own.sigmoid()),
    }
    found = (name for name, pair in tests.items() if torch.allclose(*pair(), **tolerance))  # type: ignore[arg-type]
    return next(found, None)


def kind_of(call: LossCall, relation: Relation | None, layout: Layout) -> OutputLikelihood | None:
    """What a call says about an output; None if it says nothing of it."""
    if call.function in (F.cross_entropy, F.nll_loss) and relation in {"same", "log"}:
        return categorical(call, layout.dim, relation == "same")
    if call.function in (F.binary_cross_entropy_with_logits, F.multilabel_soft_margin_loss) and relation in _OF_LOGITS:
        return Bernoulli(_pos_weight(call, layout), relation == "same")
    known = _KINDS.get((call.function, relation))
    if call.function is F.poisson_nll_loss:
        known = _COUNTS.get((bool(call.options.get("log_input", True)), relation))
    if call.function in _ROBUST and relation == "same":
        return Raw(f"{call.function.__name__} is the likelihood of noise with longer tails than a Gaussian")
    return None if known is None else known()


def categorical(call: LossCall, dim: int | None, is_logits: bool = True) -> Categorical | None:
    """The classes of a call; weights alone where the loss has them."""
    weight = call.options.get("weight") if call.function in (F.cross_entropy, F.nll_loss) else None
    smoothing = float(call.options.get("label_smoothing", 0.0))
    given = None if weight is None else weight.tolist()
    return Categorical(dim, given, smoothing, is_logits, call.reduction == "mean" or given is None) if dim else None


_OF_LOGITS: Final = {"same", "logit"}
_ROBUST: Final = {F.l1_loss, F.smooth_l1_loss, F.huber_loss}
_KINDS: Final[dict[Any, Callable[[], OutputLikelihood]]] = {
    (F.binary_cross_entropy, "same"): lambda: Bernoulli(is_logits=False),
    (F.binary_cross_entropy, "sigmoid"): Bernoulli,
    (F.mse_loss, "same"): Gaussian,
}
_COUNTS: Final[dict[Any, Callable[[], OutputLikelihood]]] = {  # by log_input
    (True, "same"): Poisson,
    (True, "log"): lambda: Poisson(is_log=False),
    (False, "same"): lambda: Poisson(is_log=False),
    (False, "exp"): Poisson,
}


def _pos_weight(call: LossCall, layout: Layout) -> Any:
    """The weights of positive labels in the layout of one example's outputs."""
    given = call.options.get("pos_weight")
    if given is None:
        return None
    if given.numel() == 1:
        return float(given)
    weights = layout.moved(given.detach().expand(call.outputs.shape))
    return weights[0].tolist()


def joint_kind(kinds: Sequence[OutputLikelihood]) -> OutputLikelihood | None:
    """The kind of an output with several terms: their own, that of means for several errors, or None for a contradiction."""
    if all(kind.state() == kinds[0].state() for kind in kinds):
        return kinds[0]
    reasons = [kind.why for kind in kinds if isinstance(kind, Raw)]
    return Raw(reasons[0]) if reasons and all(isinstance(kind, (Gaussian, Raw)) for kind in kinds) else None


def term_of(call: LossCall, leaf: Leaf, kind: OutputLikelihood, layout: Layout, scale: Scale) -> Term:
    """The term of a call, whose targets count unless they are ignored, not selected, or multiplied by zero."""
    mask, targets, weights = layout.read.clone(), None, None
    if call.counted is not None:
        mask &= layout.moved(call.counted)
    if call.targets is not None:
        targets = _targets(call, layout)
    of_each = None if scale.is_function else _weights(call, scale)
    if of_each is not None and of_each.numel() == math.prod(call.shape):
        weights = layout.moved(of_each)
        mask &= weights != 0
        used = weights[mask]
        is_equal = not used.numel() or torch.allclose(used, used[:1].expand_as(used), rtol=1e-3)
        weights = None if is_equal else torch.where(mask, weights / used.mean(), 0)
    departs: Departs = "function" if scale.is_function else "" if weights is None else "weights"
    if departs == "function" and isinstance(kind, (Gaussian, Poisson)):  # such as a squared error over a variance
        kind = Raw(f"the loss weighs {call.function.__name__} by a function of the outputs")
    is_index = call.counted is not None
    ignored = float(call.options.get("ignore_index", -100)) if is_index else None
    return Term((leaf,), kind, targets, None if bool(mask.all()) else mask, weights, departs, ignored)


def _targets(call: LossCall, layout: Layout) -> Tensor:
    assert call.targets is not None
    targets = call.targets.detach()
    if targets.numel() == math.prod(call.shape) or not call.known.has_classes:
        return layout.moved(targets.expand(call.shape) if targets.dim() <= len(call.shape) else targets)
    probs = targets.movedim(min(1, targets.dim() - 1), -1)  # of the classes
    moved = probs.reshape(-1, probs.shape[-1])[layout.rows.clamp_min(0)]
    assert layout.dim is not None
    return moved.movedim(-1, layout.dim)


def _weights(call: LossCall, scale: Scale) -> Tensor | None:
    """The weight of each target's loss in the whole loss; None where all are equal, or follow from the target's class."""
    own = None if call.known.has_classes else call.options.get("weight")
    of_each = scale.gradient.detach() if call.reduction == "none" else None
    if isinstance(own, Tensor):
        own = own.detach().expand(call.shape)
        return own if of_each is None else own * of_each
    return of_each
