"""SIGTERM in distributed training: a signal to one rank stops all ranks after the same update.

A rank that stops one update before the others leaves them waiting. Lightning 2.6 also broadcasts from its signal handler,
which deadlocks with a rank that is inside a reduction. Therefore the signal is deferred, the reduction of the next update
informs all ranks, and after that update every rank calls the previously installed handler.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

import torch
from torch import Tensor


class DeferredSigterm:
    """Defers SIGTERM until all ranks know of it, then calls the previously installed handler."""

    def __init__(self) -> None:
        self._handler: Any = None  # the previously installed handler
        self._received = self._agreed = False

    def defer(self) -> None:
        """Start deferring the signal. The system's default handler, which ends the process at once, is not replaced."""
        handler = signal.getsignal(signal.SIGTERM)
        if self._handler is None and callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, signum: int, frame: Any) -> None:
        self._received = True

    def flag(self, device: torch.device) -> Tensor:
        """This rank's flag for a reduction, ``[1]``: above 0 if it has received the signal."""
        return torch.full((1,), float(self._received), device=device)

    def update(self, reduced: Tensor) -> None:
        """Record whether any rank has received the signal, from the mean of `flag` over ranks."""
        self._agreed = bool(reduced > 0)

    def deliver(self) -> None:
        """Call the previously installed handler if any rank has received the signal."""
        if self._agreed and self._handler is not None:
            self._received = self._agreed = False
            self._handler(signal.SIGTERM, None)

    def stop(self) -> None:
        """Stop deferring and reinstall the previous handler."""
        if self._handler is not None and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._handler)
        self._handler = None
        self._received = self._agreed = False
