"""A character-level recurrent network. The defaults match torch-rnn and DeepOBS' ``tolstoi_char_rnn``."""

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
        vocabulary: Number of distinct characters V.
        embedding: Width of the embedding.
        hidden: Hidden units per layer.
        layers: Number of layers.
        cell: ``"lstm"`` or ``"gru"``.
        context: Number of characters before each chunk, see `TextDataModule`. They are processed without gradients, with the
            same weights, to compute the initial state of the chunk.

    Raises:
        HyperparameterError: If a size or the cell is out of range.
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
                f"cell={cell!r} and context={context}. Sizes must be at least 1 and context at least 0; cells are "
                f"{', '.join(_CELLS)}."
            )
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.recurrent = _CELLS[cell](embedding, hidden, layers, batch_first=True)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits ``[batch, V, T]`` of the next characters, from character indices ``[batch, context + T]``."""
        context, chunk = characters[:, : self.context], characters[:, self.context :]
        hidden, _ = self.recurrent(self.embedding(chunk), self._state_after(context))
        logits: Tensor = self.output(hidden).mT
        return logits

    def _state_after(self, context: Tensor) -> Any:
        if context.shape[1] == 0:
            return None
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            return self.recurrent(self.embedding(context))[1]
