"""K-FAC and Noisy K-FAC on an unmodified LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast, final

from typing_extensions import Never, Unpack

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.fit.fields import CallbackFields
from lightning_bayes.optim import KFAC, NoisyKFAC
from lightning_bayes.optim.kronecker.kfac import KroneckerOwn, NoisyKroneckerOwn
from lightning_bayes.optim.settings import joined_help

_DEFAULTS = {"damping": 1e-3}
# With the user's step, the curvature only shapes the noise: half the work, with the same averaging time in updates.
_USER_STEP_DEFAULTS = {**_DEFAULTS, "stats_interval": 20, "inverse_interval": 200, "betas": (0.9, 0.9)}
_PAPER_DEFAULTS = {"stats_interval": 10, "inverse_interval": 100, **NoisyKFAC.own_defaults}


class _KFACFields(CallbackFields, KroneckerOwn, total=False):
    __doc__ = joined_help(CallbackFields, KroneckerOwn)  # type: ignore[misc]


class _NoisyKFACFields(CallbackFields, NoisyKroneckerOwn, total=False):
    __doc__ = joined_help(CallbackFields, NoisyKroneckerOwn)  # type: ignore[misc]


@final
class KFACCallback(VariationalCallback):
    """Trains with K-FAC (`lightning_bayes.KFAC`), without noise: it leaves no posterior.

    Without `lr` its own step is bounded by `optim.steps`. Defaults: ``damping=1e-3`` and
    ``betas=(0.9, 0.95)``: β₁ weights the old momentum in each update, β₂ the old curvature in each measurement.
    """

    optimizer_class = KFAC
    field_defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS

    def __init__(self, *unnamed: Never, **fields: Unpack[_KFACFields]) -> None:
        super().__init__(*unnamed, **cast(CallbackFields, fields))


@final
class NoisyKFACCallback(VariationalCallback):
    """Trains with Noisy K-FAC (`lightning_bayes.NoisyKFAC`).

    ``Trainer(callbacks=[NoisyKFACCallback()])`` computes gradients at weight samples, lets the user's optimizer step, and
    stores a posterior in the checkpoint in which the weights of a layer are correlated. Defaults: ``damping=1e-3``,
    ``stats_interval=20``, ``inverse_interval=200`` and ``betas=(0.9, 0.9)``: β₁ weights the old momentum in each update, β₂
    the old curvature in each measurement. With ``lr``, the papers' step, the intervals are 10 and 100, and β₂ is 0.95. The
    optimizer `lightning_bayes.NoisyKFAC` has ``damping=0``.
    """

    optimizer_class = NoisyKFAC
    field_defaults: ClassVar[Mapping[str, Any]] = _USER_STEP_DEFAULTS

    def __init__(self, *unnamed: Never, **fields: Unpack[_NoisyKFACFields]) -> None:
        if fields.get("lr") is not None:
            fields = cast(_NoisyKFACFields, {**_PAPER_DEFAULTS, **fields})
        super().__init__(*unnamed, **cast(CallbackFields, fields))
