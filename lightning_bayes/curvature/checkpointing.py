"""Whether a segment under activation checkpointing runs: its forward runs again in backward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType

from torch.utils.checkpoint import CheckpointFunction


def in_reentrant_checkpoint() -> bool:
    """Whether a reentrant checkpoint runs this segment without gradients, to repeat it in backward."""
    return _is_called_by(lambda code: code is CheckpointFunction.forward.__code__)


def in_checkpoint() -> bool:
    """Whether a checkpoint runs this segment. What autograd saves in it is recomputed at every reading."""
    own = CheckpointFunction.forward.__code__.co_filename
    return _is_called_by(lambda code: code.co_filename == own)


def _is_called_by(matches: Callable[[CodeType], bool]) -> bool:
    frame = sys._getframe(1)
    while frame is not None and not matches(frame.f_code):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
