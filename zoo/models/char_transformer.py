"""A small character-level decoder-only transformer."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError


@final
class CharTransformer(nn.Module):
    """Character and position embeddings, causal self-attention, and logits of the next character at every position.

    Args:
        vocabulary: Number of distinct characters V.
        length: Maximum number of positions, including the context.
        width: Width of the residual stream.
        heads: Number of attention heads, a divisor of the width.
        layers: Number of pre-norm blocks.
        context: Number of leading positions without a prediction, see `TextDataModule`.

    Raises:
        HyperparameterError: If the sizes are inconsistent.
    """

    causal: Tensor

    def __init__(
        self, vocabulary: int, length: int = 50, width: int = 128, heads: int = 4, layers: int = 2, context: int = 0
    ) -> None:
        if min(vocabulary, length, width, heads, layers) < 1 or width % heads or not 0 <= context < length:
            raise HyperparameterError(
                f"CharTransformer got vocabulary={vocabulary}, length={length}, width={width}, heads={heads}, "
                f"layers={layers} and context={context}. Sizes must be at least 1, heads must divide the width, and the "
                "context must be below the length."
            )
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary)
        mask = torch.full((length, length), -torch.inf).triu(1)
        self.register_buffer("causal", mask, persistent=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits of the next characters.

        Args:
            characters: Character indices ``[batch, context + T]``, with context + T at most ``length``.

        Returns:
            ``[batch, V, T]``.

        Raises:
            HyperparameterError: If the chunk is too long.
        """
        length = characters.shape[1]
        if length > len(self.causal):
            raise HyperparameterError(
                f"A chunk of {length} characters is too long for CharTransformer(length={len(self.causal)}). Shorten the "
                "chunk, or raise the length."
            )
        positions = torch.arange(length, device=characters.device).expand_as(characters)
        hidden = self.characters(characters) + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.causal[:length, :length])
        logits: Tensor = self.output(self.norm(hidden[:, self.context :])).mT
        return logits
