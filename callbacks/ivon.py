"""IVON on an unmodified LightningModule."""

from __future__ import annotations

import math
from typing import final

from typing_extensions import Unpack

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.fields import CallbackFields
from lightning_bayes.optim import IVON, Schedule
from lightning_bayes.optim.diagonal.ivon import check_rescaling


@final
class IVONCallback(VariationalCallback):
    """Trains with improved variational online Newton (`lightning_bayes.IVON`): one backward pass of any layer.

    Default: ``betas=(0.9, 0.99999)``. β₂ is close to 1, as in the paper, because the curvature estimate is noisy.

    Args:
        clip_radius: Bound of each component of the natural step, before the learning rate is applied.
        rescale_lr: Whether to multiply an explicit `lr` by the initial curvature, which makes it comparable to SGD's.
        **fields: See `CallbackFields`; ``engine`` has no effect.
    """

    optimizer_class = IVON

    def __init__(
        self, clip_radius: float | Schedule = math.inf, rescale_lr: bool = False, **fields: Unpack[CallbackFields]
    ) -> None:
        super().__init__(**fields)
        self.set_own(clip_radius=clip_radius, rescale_lr=rescale_lr)
        check_rescaling(self.group_defaults)
