"""PyTorch's loss functions: where each takes its outputs and targets, and whose loss is a likelihood of them as it stands.

    cross_entropy                       Categorical
    mse_loss                            Gaussian with variance ½: its -log p is |f - y|² + constant
    binary_cross_entropy_with_logits    Bernoulli

The loss of an example is ℓ_i = -log p(y_i | f_i) / w + constant. With ``reduction="sum"``, w is 1. With ``"mean"``, w is the
number of terms per example: pixels or positions for the cross entropy, outputs for the other two. `terms.kind_of` tells what
any loss says about an output of a network.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.likelihood.base import OutputLikelihood
from lightning_bayes.likelihood.bernoulli import Bernoulli
from lightning_bayes.likelihood.categorical import Categorical
from lightning_bayes.likelihood.example_dims import Order, Shape, example_dim
from lightning_bayes.likelihood.gaussian import Gaussian

Reduction: TypeAlias = Literal["mean", "sum", "none"]
ADVICE: Final = (
    "Return the result of F.cross_entropy, F.mse_loss or F.binary_cross_entropy_with_logits (or of their modules) "
    "unchanged, without other terms or factors."
)


class LossFunction(NamedTuple):
    """What is known about a loss function."""

    outputs: str = "input"  # names of its arguments
    targets: str = "target"
    example_dim: int = 0  # of the outputs
    likelihood: OutputLikelihood | None = None
    has_classes: bool = False  # in dimension 1 of the outputs
    of_log_probs: bool = False  # whether its outputs may be log-probabilities of classes
    is_composite: bool = False  # whether its reduction is a node of its own, after the values


LOSS_FUNCTIONS: Final[dict[Callable[..., Tensor], LossFunction]] = {
    F.cross_entropy: LossFunction(likelihood=Categorical(), has_classes=True, of_log_probs=True),
    F.nll_loss: LossFunction(has_classes=True, of_log_probs=True),
    F.binary_cross_entropy_with_logits: LossFunction(likelihood=Bernoulli()),
    F.multilabel_soft_margin_loss: LossFunction(),
    F.binary_cross_entropy: LossFunction(),
    F.mse_loss: LossFunction(likelihood=Gaussian(math.sqrt(0.5))),
    F.l1_loss: LossFunction(),
    F.smooth_l1_loss: LossFunction(),
    F.huber_loss: LossFunction(),
    F.gaussian_nll_loss: LossFunction(is_composite=True),  # whose variance may be a parameter
    F.poisson_nll_loss: LossFunction(),
    F.kl_div: LossFunction(of_log_probs=True),
    F.ctc_loss: LossFunction("log_probs", "targets", 1, of_log_probs=True),
    F.soft_margin_loss: LossFunction(),
    F.multi_margin_loss: LossFunction(has_classes=True),
    F.multilabel_margin_loss: LossFunction(has_classes=True),
    F.hinge_embedding_loss: LossFunction(),
    F.margin_ranking_loss: LossFunction("input1"),
    F.cosine_embedding_loss: LossFunction("input1"),
    F.triplet_margin_loss: LossFunction("anchor", ""),
    F.triplet_margin_with_distance_loss: LossFunction("anchor", ""),
}


@dataclass(frozen=True, eq=False)
class LossCall:
    """One call of a loss function."""

    function: Callable[..., Tensor]
    known: LossFunction
    outputs: Tensor
    targets: Tensor | None
    reduction: Reduction
    options: dict[str, Any]
    counted: Tensor | None  # mask of the targets that are not `ignore_index`, in their shape; None if all count
    shape: Shape  # of the values that the function reduces
    unreduced: Callable[[], Tensor]  # these values, computed again

    @property
    def tensors(self) -> list[Tensor]:
        """The arguments with gradients."""
        values = (self.outputs, self.targets, *self.options.values())
        return [value for value in values if isinstance(value, Tensor) and value.requires_grad]

    def example_dim(self, value: Tensor, batch_size: int | None, order: Order) -> int | None:
        """The dimension of an argument that holds the examples."""
        classes = 1 if self.known.has_classes and self.outputs.dim() > 1 else None
        return example_dim(tuple(value.shape), batch_size, order, preferred=self.known.example_dim, classes=classes)

    @property
    def num_terms(self) -> int:
        """w, the number of terms whose mean is an example's loss."""
        return 1 if self.reduction == "sum" or not self.shape else math.prod(self.shape) // len(self.outputs)


@cache
def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """`inspect.signature`, which is slow."""
    return inspect.signature(function)


def read_call(function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LossCall | None:
    """The call of a function in `LOSS_FUNCTIONS`; None if its deprecated arguments set the reduction."""
    known, given = LOSS_FUNCTIONS[function], signature_of(function).bind(*args, **kwargs).arguments
    options = dict(given)
    if options.get("size_average") is not None or options.get("reduce") is not None:
        return None
    reduction: Any = options.pop("reduction", "mean")
    outputs, targets = options.pop(known.outputs), options.pop(known.targets, None)
    if not outputs.requires_grad:  # such as mse_loss(y, f), or a learned variance alone
        if isinstance(targets, Tensor) and targets.requires_grad:
            outputs, targets = targets, outputs
        else:
            outputs = next(x for x in options.values() if isinstance(x, Tensor) and x.requires_grad)
    targets = targets if isinstance(targets, Tensor) else None
    is_index = function in (F.cross_entropy, F.nll_loss) and targets is not None and not targets.is_floating_point()
    shape = tuple(outputs.shape)
    return LossCall(
        function,
        known,
        outputs,
        targets,
        "mean" if reduction == "batchmean" else reduction,
        options,
        targets != options.get("ignore_index", -100) if is_index else None,
        _without_classes(shape) if known.has_classes else shape,
        partial(function, **{**given, "reduction": "none"}),
    )


def _without_classes(shape: Shape) -> Shape:
    """The shape of the values that are reduced: classes are dimension 1, and all of an example without a batch."""
    return (*shape[:1], *shape[2:]) if len(shape) > 1 else ()


def likelihood_call(call: LossCall | None, reader: str) -> tuple[LossCall, OutputLikelihood]:
    """A call with its likelihood; refuse functions without one, weights, ignored targets and ``reduction="none"``."""
    likelihood = None if call is None else call.known.likelihood
    if call is None or likelihood is None:
        raise UnsupportedTrainingError(f"{reader} needs a loss that one supported loss function returns. {ADVICE}")
    name, target = call.function.__name__, call.targets
    unsupported = [option for option in ("weight", "pos_weight") if call.options.get(option) is not None]
    if unsupported:
        raise UnsupportedTrainingError(
            f"{reader} does not support {name} with {' and '.join(unsupported)}. Remove the argument."
        )
    if call.reduction == "none":
        raise UnsupportedTrainingError(
            f"{reader} needs a scalar from {name}, but reduction='none'. Use reduction='mean' or 'sum'."
        )
    is_soft = name == "cross_entropy" and target is not None and target.is_floating_point()
    if target is not None and is_soft and not torch.allclose(target.sum(1), torch.ones_like(target[:, 0])):
        raise UnsupportedTrainingError(
            f"{reader} needs probabilities that sum to 1 as floating-point targets of cross_entropy. Normalise them."
        )
    if call.counted is not None and not bool(call.counted.all()):
        raise UnsupportedTrainingError(
            f"{reader} does not support targets equal to ignore_index. Remove these examples from the batch."
        )
    return call, likelihood
