"""A warning, given once, where batches of their size do not measure a curvature."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, final

from lightning_bayes.optim.diagonal.estimators.estimator import CurvatureEstimator
from lightning_bayes.optim.runtime.passes import Measurement


@final
class BatchSizeCheck:
    """Warns of the batches of one optimizer.

    Args:
        estimator: Its curvature estimator.
        optimizer: Its name.
    """

    def __init__(self, estimator: CurvatureEstimator, optimizer: str) -> None:
        self._estimator, self._optimizer = estimator, optimizer
        self._has_warned = False

    def __call__(self, measurement: Measurement, group: Mapping[str, Any]) -> None:
        """Look at the batches of an update.

        Args:
            measurement: The update's measurement; one whose examples were not counted says nothing.
            group: A parameter group, which counts the update already.
        """
        is_dry_run = group["step"] == 1  # of one batch, which means nothing
        if self._has_warned or is_dry_run or not group["noisy"] or not measurement.is_counted:
            return
        batch_size = measurement.num_examples / measurement.num_samples
        if text := self._estimator.warning(batch_size, group, self._optimizer):
            self._has_warned = True
            warnings.warn(text, stacklevel=4)
