"""Character-level text: each chunk of a file predicts its next characters.

The file is split contiguously, in order: 80 % training, 10 % validation and 10 % test. No test sentence is surrounded by
training sentences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_bayes.errors import DataError, DatasetError, HyperparameterError, name_some


@final
class Alphabet:
    """Maps characters to indices and back."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self._indices = {character: index for index, character in enumerate(characters)}

    @classmethod
    def of(cls, text: str) -> Alphabet:
        """The alphabet of a text, in code point order."""
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """The indices of a text's characters, ``[len(text)]``."""
        unknown = sorted(set(text) - self._indices.keys())
        if unknown:
            raise DataError(
                f"The text has characters outside the alphabet: {name_some(map(repr, unknown))}. Remove or replace them; "
                "data.alphabet.characters lists the alphabet."
            )
        return torch.tensor([self._indices[character] for character in text], dtype=torch.long)

    def decode(self, indices: Any) -> str:
        """Convert character indices ``[length]`` to a text."""
        return "".join(self.characters[int(index)] for index in indices)


@final
class Chunks(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive chunks of a text and their next characters."""

    def __init__(self, text: Tensor, length: int, context: int = 0) -> None:
        self.text, self.length, self.context = text, length, context

    def __len__(self) -> int:
        return max(0, (len(self.text) - self.context - 1) // self.length)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        end = start + self.context + self.length
        return self.text[start:end], self.text[start + self.context + 1 : end + 1]


@final
class TextDataModule(LightningDataModule):
    """A text file in chunks; batches are ``(characters [batch, context + T], next characters [batch, T])``.

    The task's loss is a mean over the T characters of a chunk, so a callback with a posterior must count each chunk as T
    examples; otherwise the posterior would be too wide by a factor of √T. ``data_augmentation_factor`` passes T to it.

    Args:
        path: The text file, in UTF-8.
        length: Number of characters T that a chunk predicts.
        context: Number of characters before a chunk that the model sees but does not predict. They set the initial state of
            a recurrent network.
        batch_size: Chunks per batch.
        limit: Number of characters to use, from the beginning of the file; None uses all.

    Raises:
        HyperparameterError: If a size is out of range.
    """

    def __init__(
        self, path: str, length: int = 50, context: int = 0, batch_size: int = 50, limit: int | None = None
    ) -> None:
        super().__init__()
        if min(length, batch_size) < 1 or context < 0:
            raise HyperparameterError(
                f"length={length} and batch_size={batch_size} must be at least 1, and context={context} at least 0."
            )
        self.path, self.length, self.context = path, length, context
        self.batch_size, self.limit = batch_size, limit

    @property
    def data_augmentation_factor(self) -> float:
        """The number of labels T per chunk."""
        return float(self.length)

    def setup(self, stage: str) -> None:
        """Read and split the text. Repeated calls do nothing. Raises DataError if a part is too short for one chunk."""
        if hasattr(self, "alphabet"):
            return
        text = _read(self.path)[: self.limit]
        self.alphabet = Alphabet.of(text)
        indices = self.alphabet.encode(text)
        train_end, val_end = round(0.8 * len(indices)), round(0.9 * len(indices))
        parts = (indices[:train_end], indices[train_end:val_end], indices[val_end:])
        self.train_set, self.val_set, self.test_set = (Chunks(part, self.length, self.context) for part in parts)
        if min(map(len, (self.train_set, self.val_set, self.test_set))) == 0:
            raise DataError(
                f"{self.path} has {len(text)} characters, and a tenth of them is too short for a chunk of {self.context} + "
                f"{self.length}. Use a text of more than {10 * (self.context + self.length + 1)} characters, or shorter "
                "chunks."
            )

    def train_dataloader(self) -> DataLoader[Any]:
        """The training chunks, shuffled by torch's global generator."""
        return DataLoader(self.train_set, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """The validation chunks."""
        return DataLoader(self.val_set, self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        """The test chunks."""
        return DataLoader(self.test_set, self.batch_size)


def _read(path: str) -> str:
    file = Path(path)
    if not file.is_file():
        raise DatasetError(f"There is no text file {file.absolute()}. Set data.path to a UTF-8 text, such as a novel.")
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}. Convert it, for example with iconv -t utf-8.") from error
