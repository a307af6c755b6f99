"""PyTorch's loss functions: where each takes its outputs and targets, and the link that its outputs need.

    softmax    cross entropy with hard or soft targets, NLL of log-probabilities
    sigmoid    BCE with logits, multi-label soft margin
    exp        Poisson NLL of log-rates
    identity   MSE, L1, smooth L1, Huber, Gaussian NLL, BCE of probabilities, Poisson NLL of rates

Other losses say nothing about predictions: CTC, KL and margin losses may act on embeddings or on sequences.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.curvature.example_dims import Order, example_dim

LossLink: TypeAlias = Literal["softmax", "sigmoid", "identity", "exp"]
Reduction: TypeAlias = Literal["mean", "sum", "none"]


class LossFunction(NamedTuple):
    """What is known about a loss function."""

    link: LossLink | None = None
    outputs: str = "input"  # names of its arguments
    targets: str = "target"
    example_dim: int = 0  # of the outputs
    is_composite: bool = False  # whether its reduction is a node of its own, after the values


LOSS_FUNCTIONS: Final[dict[Callable[..., Tensor], LossFunction]] = {
    F.cross_entropy: LossFunction("softmax"),
    F.nll_loss: LossFunction("softmax"),
    F.binary_cross_entropy_with_logits: LossFunction("sigmoid"),
    F.multilabel_soft_margin_loss: LossFunction("sigmoid"),
    F.binary_cross_entropy: LossFunction("identity"),  # outputs are probabilities, and so is their average
    F.mse_loss: LossFunction("identity"),
    F.l1_loss: LossFunction("identity"),
    F.smooth_l1_loss: LossFunction("identity"),
    F.huber_loss: LossFunction("identity"),
    F.gaussian_nll_loss: LossFunction("identity", is_composite=True),  # whose variance may be a parameter
    F.poisson_nll_loss: LossFunction("exp"),
    F.kl_div: LossFunction(),
    F.ctc_loss: LossFunction(None, "log_probs", "targets", 1),
    F.soft_margin_loss: LossFunction(),
    F.multi_margin_loss: LossFunction(),
    F.multilabel_margin_loss: LossFunction(),
    F.hinge_embedding_loss: LossFunction(),
    F.margin_ranking_loss: LossFunction(None, "input1"),
    F.cosine_embedding_loss: LossFunction(None, "input1"),
    F.triplet_margin_loss: LossFunction(None, "anchor", ""),
    F.triplet_margin_with_distance_loss: LossFunction(None, "anchor", ""),
}


@dataclass(frozen=True, eq=False)
class LossCall:
    """One call of a loss function."""

    function: Callable[..., Tensor]
    outputs: Tensor
    targets: Tensor | None
    reduction: Reduction
    options: dict[str, Any]
    unreduced: Callable[[], Tensor]  # the values before the reduction, computed again

    @property
    def known(self) -> LossFunction:
        """What is known about the function."""
        return LOSS_FUNCTIONS[self.function]

    @property
    def link(self) -> LossLink | None:
        """The link from outputs to predictions; None if the loss does not tell."""
        if self.function is F.poisson_nll_loss and not self.options.get("log_input", True):
            return "identity"
        return self.known.link

    @property
    def counted(self) -> Tensor | None:
        """Mask of the targets that are not `ignore_index`, in the shape of the targets; None if all count."""
        if self.function not in (F.cross_entropy, F.nll_loss) or self.targets is None:
            return None
        if self.targets.is_floating_point():
            return None
        counted: Tensor = self.targets != self.options.get("ignore_index", -100)
        return counted

    @property
    def tensors(self) -> list[Tensor]:
        """The arguments with gradients."""
        values = (self.outputs, self.targets, *self.options.values())
        return [value for value in values if isinstance(value, Tensor) and value.requires_grad]

    @property
    def has_classes(self) -> bool:
        """Whether dimension 1 of the outputs holds the classes."""
        functions = (F.cross_entropy, F.nll_loss, F.multi_margin_loss, F.multilabel_margin_loss)
        return self.function in functions and self.outputs.dim() > 1

    def example_dim(self, value: Tensor, batch_size: int | None, order: Order) -> int | None:
        """The dimension of an argument that holds the examples."""
        classes = 1 if self.has_classes else None
        return example_dim(tuple(value.shape), batch_size, order, preferred=self.known.example_dim, classes=classes)

    @property
    def num_values(self) -> int:
        """Number of values that the function reduces."""
        size = self.outputs.numel()
        return size // self.outputs.shape[1] if self.has_classes else size


@cache
def _signature(function: Callable[..., Tensor]) -> inspect.Signature:
    return inspect.signature(function)


def read_call(function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LossCall | None:
    """The call of a function in `LOSS_FUNCTIONS`; None if its deprecated arguments set the reduction."""
    known, bound = LOSS_FUNCTIONS[function], _signature(function).bind(*args, **kwargs)
    arguments = dict(bound.arguments)
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        return None
    reduction: Any = arguments.pop("reduction", "mean")
    outputs, targets = arguments.pop(known.outputs), arguments.pop(known.targets, None)
    if not outputs.requires_grad:  # such as mse_loss(y, f), or a learned variance alone
        if isinstance(targets, Tensor) and targets.requires_grad:
            outputs, targets = targets, outputs
        else:
            outputs = next(x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad)
    reduction = "mean" if reduction == "batchmean" else reduction
    unreduced = partial(function, **{**bound.arguments, "reduction": "none"})
    return LossCall(
        function, outputs, targets if isinstance(targets, Tensor) else None, reduction, arguments, unreduced
    )
