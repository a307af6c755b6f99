"""SIGTERM in distributed training: a signal to one rank ends all ranks after the same update.

A rank that ends an update earlier than another leaves it waiting. And Lightning 2.6 broadcasts from within its signal
handler, which another rank may meet in the middle of a reduction: both hang. So the signal is deferred, the next reduction
of an update tells all ranks, and after this update every rank delivers it to the handler that was installed before.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

import torch
from torch import Tensor


class DeferredSigterm:
    """Keeps SIGTERM from the handler that was installed before, until all ranks know of it."""

    def __init__(self) -> None:
        self._handler: Any = None  # the one that was installed before
        self._received = self._agreed = False

    def defer(self) -> None:
        """Defer the signal from now on. The system's own handler, which ends the process at once, stays."""
        handler = signal.getsignal(signal.SIGTERM)
        if self._handler is None and callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, signum: int, frame: Any) -> None:
        self._received = True

    def flag(self, device: torch.device) -> Tensor:
        """Make this rank's part of a reduction: above 0 if it has received the signal.

        Args:
            device: Where the reduction takes place.

        Returns:
            The flag, ``[1]``.
        """
        return torch.full((1,), float(self._received), device=device)

    def update(self, reduced: Tensor) -> None:
        """Note whether any rank has received the signal.

        Args:
            reduced: The mean of `flag` over ranks.
        """
        self._agreed = bool(reduced > 0)

    def deliver(self) -> None:
        """Call the handler that was installed before, if any rank has received the signal."""
        if self._agreed and self._handler is not None:
            self._received = self._agreed = False
            self._handler(signal.SIGTERM, None)

    def stop(self) -> None:
        """Stop deferring; the handler that was installed before is back."""
        if self._handler is not None and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._handler)
        self._handler = None
        self._received = self._agreed = False
