"""A recurrent network over characters, by default that of torch-rnn and of DeepOBS' ``tolstoi_char_rnn``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final, Literal, final

import torch
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError

_CELLS: Final[dict[str, Callable[..., nn.Module]]] = {"lstm": nn.LSTM, "gru": nn.GRU}


@final
class CharRNN(nn.Module):
    """Embedding, recurrent layers, and logits of the next character at every position.

    Args:
        vocabulary: Number of characters V.
        embedding: Width of the embedding.
        hidden: Units of each layer.
        layers: Number of layers.
        cell: ``"lstm"`` or ``"gru"``.
        context: Characters before each chunk, see `TextDataModule`. They run without gradients, under the same weights, and
            leave the state in which the chunk begins.

    Raises:
        HyperparameterError: If a size or the cell is out of range.

    Example:
        >>> CharRNN(vocabulary=30, hidden=16, context=2)(torch.zeros(4, 7, dtype=torch.long)).shape
        torch.Size([4, 30, 5])
    """

    def __init__(
        self,
        vocabulary: int,
        embedding: int = 64,
        hidden: int = 128,
        layers: int = 2,
        cell: Literal["lstm", "gru"] = "lstm",
        context: int = 0,
    ) -> None:
        if cell not in _CELLS or min(vocabulary, embedding, hidden, layers) < 1 or context < 0:
            raise HyperparameterError(
                f"CharRNN got vocabulary={vocabulary}, embedding={embedding}, hidden={hidden}, layers={layers}, "
                f"cell={cell!r} and context={context}. Sizes must be at least 1, the "
                f"context at least 0; cells are {', '.join(_CELLS)}."
            )
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.recurrent = _CELLS[cell](embedding, hidden, layers, batch_first=True)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits of the characters that follow.

        Args:
            characters: Numbers, ``[batch, context + T]``.

        Returns:
            ``[batch, V, T]``.
        """
        before, chunk = characters[:, : self.context], characters[:, self.context :]
        hidden, _ = self.recurrent(self.embedding(chunk), self._state(before))
        logits: Tensor = self.output(hidden).mT
        return logits

    def _state(self, before: Tensor) -> Any:
        if before.shape[1] == 0:
            return None
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            return self.recurrent(self.embedding(before))[1]
