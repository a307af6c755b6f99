"""A one-time warning if the batch size makes the gradient magnitude a poor curvature."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, final

from lightning_bayes.optim.passes import Measurement


@final
class BatchSizeCheck:
    """Warns if the batches of one optimizer have the wrong size for `BatchSquare`.

    Args:
        optimizer: Name of the optimizer.
    """

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._has_warned = False

    def __call__(self, measurement: Measurement, group: Mapping[str, Any]) -> None:
        """Check the batches of one update.

        Args:
            measurement: Measurement of the update; skipped if its examples were not counted.
            group: A parameter group that counts this update already.
        """
        is_dry_run = group["posterior"]["step"] == 1  # a single batch, such as fast_dev_run's, proves nothing
        if self._has_warned or is_dry_run or not group["posterior"]["noisy"] or not measurement.is_counted:
            return
        batch_size = measurement.num_examples / measurement.num_samples
        if text := self._complaint(batch_size, group):
            self._has_warned = True
            warnings.warn(text, stacklevel=4)

    def _complaint(self, batch_size: float, group: Mapping[str, Any]) -> str:
        num_data, is_of_sum = group["posterior"]["num_data"], group["posterior"].get("scaling") == "sum"
        if is_of_sum and batch_size < num_data:
            return (
                f"{self._optimizer} with scaling='sum' needs all {num_data} examples in one batch; with {batch_size:g} the "
                f"posterior precision is about {num_data / batch_size:.0f} times too large. Use scaling='mean', or VOGN."
            )
        if not is_of_sum and batch_size >= num_data > 1:
            return (
                f"{self._optimizer} uses the squared gradient of a batch as its curvature, and the batch holds all "
                f"{num_data} examples: near an optimum that is zero, whatever the curvature, so the posterior is about as "
                "wide as the prior. Use smaller batches, or VOGN."
            )
        return ""
