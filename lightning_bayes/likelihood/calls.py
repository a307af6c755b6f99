"""The calls of loss functions, and of ``log_softmax``, that a training step makes."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.likelihood.loss_functions import LOSS_FUNCTIONS, LossCall, read_call
from lightning_bayes.likelihood.positions import Edge, edge_of
from lightning_bayes.private_torch import EagerMode

_LOG_SOFTMAX: Final = {F.log_softmax, torch.log_softmax, Tensor.log_softmax}


class NotedCall(NamedTuple):
    """A call of a loss function with its result."""

    call: LossCall
    result: Tensor


class LogProbs(NamedTuple):
    """A call of ``log_softmax``."""

    logits: Tensor
    values: Tensor
    dim: int


@final
class CallRecorder(EagerMode):
    """Notes calls inside its context, by the edges of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[Edge, NotedCall] = {}
        self.log_probs: dict[Edge, LogProbs] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or result.grad_fn is None:
            return result
        if func in LOSS_FUNCTIONS:
            call = read_call(func, args, kwargs or {})
            if call is not None:
                self.losses[edge_of(result)] = NotedCall(call, result)
        elif func in _LOG_SOFTMAX:
            self._note_log_probs(result, *args, **(kwargs or {}))
        return result

    def clear(self) -> None:
        """Forget the calls, whose tensors this object keeps alive."""
        self.losses.clear()
        self.log_probs.clear()

    def _note_log_probs(self, values: Tensor, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> None:
        if dim is not None:
            self.log_probs[edge_of(values)] = LogProbs(input, values, dim % max(values.dim(), 1))
