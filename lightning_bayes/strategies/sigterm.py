"""SIGTERM where several ranks train: one rank's signal ends all of them after the same update.

A rank that ends an update earlier than another leaves it waiting, and Lightning 2.6 broadcasts from within its signal
handler, which another rank may meet in the middle of a reduction: both hang. So the signal is kept, the next reduction of
an update tells it to all ranks, and after this update all of them hand it to the handler that was there before.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

import torch
from torch import Tensor


class KeptSigterm:
    """Keeps SIGTERM from the handler that was there before, until all ranks know of it."""

    def __init__(self) -> None:
        self._handler: Any = None  # the one that was there before
        self._received = self._agreed = False

    def keep(self) -> None:
        """Keep the signal from now on. The system's own handler, which ends the process at once, stays."""
        handler = signal.getsignal(signal.SIGTERM)
        if self._handler is None and callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, signum: int, frame: Any) -> None:
        self._received = True

    def told(self, device: torch.device) -> Tensor:
        """What this rank says in a reduction: above 0 where it has received the signal, ``[1]``."""
        return torch.full((1,), float(self._received), device=device)

    def hear(self, reduced: Tensor) -> None:
        """Take what all ranks said: the mean of `told` over them."""
        self._agreed = bool(reduced > 0)

    def hand_over(self) -> None:
        """Call the handler that was there before, if a rank has received the signal."""
        if self._agreed and self._handler is not None:
            self._received = self._agreed = False
            self._handler(signal.SIGTERM, None)

    def stop(self) -> None:
        """Let the signal go where it went before."""
        if self._handler is not None and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._handler)
        self._handler = None
        self._received = self._agreed = False
