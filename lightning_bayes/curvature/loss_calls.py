"""The calls of loss functions, whose likelihood labels are drawn from: the Fisher of the loss that is there.

    cross_entropy                       Softmax
    mse_loss                            Gaussian of variance ½, whose negative log-likelihood is |f - y|² + constant
    binary_cross_entropy_with_logits    Bernoulli

An example's own loss is ℓ_i = -log p(y_i | f_i) / w + constant. By ``reduction="sum"`` w is 1; by ``"mean"`` it is the
number of terms that the example has: pixels or positions of a cross entropy, outputs of the two others.
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
    "Return what F.cross_entropy, F.mse_loss or F.binary_cross_entropy_with_logits (or their modules) returns, with "
    "nothing added or scaled."
)


class LossCall(NamedTuple):
    """One call of a loss function.

    Attributes:
        function: The function.
        outputs: Its first argument, the model's outputs.
        target: Its second argument.
        options: ``reduction`` and ``label_smoothing``, where they were given.
    """

    function: Callable[..., Tensor]
    outputs: Tensor
    target: Tensor
    options: dict[str, Any]

    @property
    def terms(self) -> int:
        """w, the terms whose mean is an example's loss."""
        if self.options.get("reduction", "mean") == "sum":
            return 1
        size = self.outputs[0].numel()
        return size // self.outputs.shape[1] if self.function is F.cross_entropy else size


def read_call(function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], reader: str) -> LossCall:
    """Read the arguments of a loss function.

    Args:
        function: One of `LIKELIHOODS`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        reader: The part that needs the likelihood, for messages.

    Returns:
        The call. Weighted or ignored examples, and a loss that is not a scalar, are an `UnsupportedTrainingError`.
    """
    options: dict[str, Any] = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    outputs, target = options.pop("input"), options.pop("target")
    _check(function.__name__, options, target, reader)
    kept: dict[str, Any] = {key: options[key] for key in ("reduction", "label_smoothing") if key in options}
    return LossCall(function, outputs, target, kept)


def _check(name: str, options: dict[str, Any], target: Tensor, reader: str) -> None:
    unknown = [o for o in ("weight", "pos_weight", "size_average", "reduce") if options.get(o) is not None]
    if unknown:
        raise UnsupportedTrainingError(f"{reader} does not know {name} with {' and '.join(unknown)}. Leave it out.")
    if options.get("reduction", "mean") not in {"mean", "sum"}:
        raise UnsupportedTrainingError(
            f"{reader} needs the scalar that {name} reduces to by itself, but reduction={options['reduction']!r}. Use "
            "reduction='mean' or 'sum'."
        )
    if name != "cross_entropy":
        return
    if target.is_floating_point() and not torch.allclose(target.sum(1), torch.ones_like(target[:, 0])):
        raise UnsupportedTrainingError(f"{reader} takes targets of cross_entropy for probabilities, which sum to 1.")
    if not target.is_floating_point() and (target == options.get("ignore_index", -100)).any():
        raise UnsupportedTrainingError(
            f"{reader} counts targets that are ignore_index like any other. Take these examples out of the batch."
        )


class LossCalls(TorchFunctionMode):
    """While on, notes the calls of loss functions on outputs with gradients.

    Args:
        reader: The part that needs the likelihood, for messages.
    """

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
        """The call that returned `loss`.

        Args:
            loss: The loss, with its graph.

        Returns:
            The call.

        Raises:
            UnsupportedTrainingError: If no loss function returned it.
        """
        for function, args, kwargs, result in self._calls:
            if result.grad_fn is loss.grad_fn:
                return read_call(function, args, kwargs, self.reader)
        raise UnsupportedTrainingError(f"{self.reader} needs the loss as one function that it knows. {ADVICE}")
