"""Text, character by character: each chunk of a file predicts its next characters.

The file is cut into 80 % training, 10 % validation and 10 % test, contiguous and in this order. No test sentence lies
between training sentences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, final

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_bayes.errors import DataError, DatasetError, HyperparameterError, name_some

SHARES: Final = (0.8, 0.1)  # training, validation; the rest is for the test


@final
class Alphabet:
    """Numbers for characters.

    Args:
        characters: All characters, each once.

    Example:
        >>> alphabet = Alphabet.of("abba")
        >>> alphabet.encode("ba"), alphabet.decode([0, 1])
        (tensor([1, 0]), 'ab')
    """

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self._numbers = {character: number for number, character in enumerate(characters)}

    @classmethod
    def of(cls, text: str) -> Alphabet:
        """The characters of a text in the order of their code points."""
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """Numbers of a text's characters.

        Args:
            text: A text of this alphabet.

        Returns:
            ``[len(text)]``.

        Raises:
            DataError: If the text has other characters; lists them all.
        """
        unknown = sorted(set(text) - self._numbers.keys())
        if unknown:
            raise DataError(
                f"The text has characters that the model has not seen: {name_some(map(repr, unknown))}. Remove or replace "
                "them; data.alphabet.characters has all that it knows."
            )
        return torch.tensor([self._numbers[character] for character in text], dtype=torch.long)

    def decode(self, numbers: Any) -> str:
        """Text of numbers, ``[length]``."""
        return "".join(self.characters[int(number)] for number in numbers)


@final
class Chunks(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive chunks of a text and their next characters.

    Args:
        text: Numbers of characters, ``[N]``.
        length: T, characters that a chunk predicts.
        context: Characters before them that the model also sees.

    Example:
        >>> inputs, targets = Chunks(torch.arange(10), length=3, context=1)[1]
        >>> inputs, targets
        (tensor([3, 4, 5, 6]), tensor([5, 6, 7]))
    """

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

    A task's loss is a mean over the T characters of a chunk, so a callback with a posterior has to count each chunk as T
    examples. ``data_augmentation_factor`` says so; else the posterior would be wider by a factor of √T.

    Args:
        path: The text file, in UTF-8.
        length: T, characters that a chunk predicts.
        context: Characters before a chunk that the model sees without learning to predict them. It gives a recurrent network
            the state to start from.
        batch_size: Chunks per batch.
        limit: Characters of the file to use, from its beginning; None for all.

    Raises:
        HyperparameterError: If a size is out of range.

    Example:
        >>> data = TextDataModule("war_and_peace.txt")  # reads nothing before setup
        >>> data.data_augmentation_factor
        50.0
    """

    def __init__(
        self, path: str, length: int = 50, context: int = 0, batch_size: int = 50, limit: int | None = None
    ) -> None:
        super().__init__()
        if min(length, batch_size) < 1 or context < 0:
            raise HyperparameterError(
                f"length={length}, batch_size={batch_size} and context={context}: the first two must be at least 1, the "
                "last one at least 0."
            )
        self.path, self.length, self.context = path, length, context
        self.batch_size, self.limit = batch_size, limit

    @property
    def data_augmentation_factor(self) -> float:
        """T: a chunk has as many labels."""
        return float(self.length)

    def setup(self, stage: str) -> None:
        """Read and cut; a second call changes nothing.

        Args:
            stage: Ignored, a text is small.

        Raises:
            DataError: If a part of the text is too short for one chunk.
        """
        if hasattr(self, "alphabet"):
            return
        text = _read(self.path)[: self.limit]
        self.alphabet = Alphabet.of(text)
        numbers = self.alphabet.encode(text)
        first, second = (round(sum(SHARES[:parts]) * len(numbers)) for parts in (1, 2))
        parts = (numbers[:first], numbers[first:second], numbers[second:])
        self.train_set, self.val_set, self.test_set = (Chunks(part, self.length, self.context) for part in parts)
        if min(map(len, (self.train_set, self.val_set, self.test_set))) == 0:
            raise DataError(
                f"{self.path} has {len(text)} characters; a tenth gives no chunk of {self.context} + {self.length}. "
                f"Give a text of more than {10 * (self.context + self.length + 1)} characters, or shorter chunks."
            )

    def train_dataloader(self) -> DataLoader[Any]:
        """The training chunks, shuffled by torch's global generator.

        Returns:
            A loader of ``(characters, next characters)``.
        """
        return DataLoader(self.train_set, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """The validation chunks.

        Returns:
            A loader of ``(characters, next characters)``.
        """
        return DataLoader(self.val_set, self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        """The test chunks.

        Returns:
            A loader of ``(characters, next characters)``.
        """
        return DataLoader(self.test_set, self.batch_size)


def _read(path: str) -> str:
    file = Path(path)
    if not file.is_file():
        raise DatasetError(
            f"There is no text file {file.absolute()}. Set data.path to a text in UTF-8, such as a novel."
        )
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}. Convert it, for example with iconv -t utf-8.") from error
