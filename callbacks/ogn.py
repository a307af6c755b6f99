"""OGN (VOGN without noise) on an unmodified LightningModule."""

from __future__ import annotations

from typing import final

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.optim import OGN


@final
class OGNCallback(VariationalCallback):
    """Trains with online Gauss-Newton (`lightning_bayes.OGN`), the deterministic baseline: it leaves no posterior."""

    optimizer_class = OGN
