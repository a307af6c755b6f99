"""Calls of PyTorch's loss functions, and the likelihood that belongs to each, for the Fisher of a user's loss.

    cross_entropy                       Softmax
    mse_loss                            Gaussian with variance ½: its negative log-likelihood is |f - y|² + constant
    binary_cross_entropy_with_logits    Bernoulli

The loss of an example is ℓ_i = -log p(y_i | f_i) / w + constant. With ``reduction="sum"``, w is 1. With ``"mean"``, w is the
number of terms per example: pixels or positions for the cross entropy, outputs for the other two.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_bayes.curvature.likelihood import Bernoulli, Gaussian, Likelihood, Softmax
from lightning_bayes.errors import UnsupportedTrainingError

LIKELIHOODS: dict[Callable[..., Tensor], Likelihood] = {
    F.cross_entropy: Softmax(),
    F.mse_loss: Gaussian(math.sqrt(0.5)),
    F.binary_cross_entropy_with_logits: Bernoulli(),
}
ADVICE = (
    "Return the result of F.cross_entropy, F.mse_loss or F.binary_cross_entropy_with_logits (or of their modules) "
    "unchanged, without other terms or factors."
)


class LossCall(NamedTuple):
    """One call of a loss function on the model's outputs."""

    function: Callable[..., Tensor]
    outputs: Tensor
    target: Tensor
    options: dict[str, Any]  # reduction and label_smoothing, if given

    @property
    def terms(self) -> int:
        """w, the number of terms whose mean is an example's loss."""
        if self.options.get("reduction", "mean") == "sum":
            return 1
        size = self.outputs[0].numel()
        return size // self.outputs.shape[1] if self.function is F.cross_entropy else size


def read_call(function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], reader: str) -> LossCall:
    """Read the arguments of a function in `LIKELIHOODS`; refuse weights, ignored targets and ``reduction="none"``."""
    arguments: dict[str, Any] = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    outputs, target = arguments.pop("input"), arguments.pop("target")
    _check(function.__name__, arguments, target, reader)
    options: dict[str, Any] = {key: arguments[key] for key in ("reduction", "label_smoothing") if key in arguments}
    return LossCall(function, outputs, target, options)


def _check(name: str, options: dict[str, Any], target: Tensor, reader: str) -> None:
    unsupported = [o for o in ("weight", "pos_weight", "size_average", "reduce") if options.get(o) is not None]
    if unsupported:
        raise UnsupportedTrainingError(
            f"{reader} does not support {name} with {' and '.join(unsupported)}. Remove the argument."
        )
    if options.get("reduction", "mean") not in {"mean", "sum"}:
        raise UnsupportedTrainingError(
            f"{reader} needs a scalar from {name}, but reduction={options['reduction']!r}. Use reduction='mean' or 'sum'."
        )
    if name != "cross_entropy":
        return
    if target.is_floating_point() and not torch.allclose(target.sum(1), torch.ones_like(target[:, 0])):
        raise UnsupportedTrainingError(
            f"{reader} needs probabilities that sum to 1 as floating-point targets of cross_entropy. Normalise them."
        )
    if not target.is_floating_point() and (target == options.get("ignore_index", -100)).any():
        raise UnsupportedTrainingError(
            f"{reader} does not support targets equal to ignore_index. Remove these examples from the batch."
        )


class LossCalls(TorchFunctionMode):
    """Records the calls of loss functions on outputs with gradients inside the context."""

    def __init__(self, reader: str) -> None:
        super().__init__()
        self.reader = reader
        self._calls: list[tuple[Any, Any, Any, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in LIKELIHOODS and isinstance(result, Tensor) and result.requires_grad:
            self._calls.append((func, args, kwargs or {}, result))
        return result

    def call_of(self, loss: Tensor) -> LossCall:
        """The call that returned `loss`; raises `UnsupportedTrainingError` if there is none."""
        for function, args, kwargs, result in self._calls:
            if result.grad_fn is loss.grad_fn:
                return read_call(function, args, kwargs, self.reader)
        raise UnsupportedTrainingError(f"{self.reader} needs a loss that one supported loss function returns. {ADVICE}")
