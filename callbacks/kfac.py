"""K-FAC and Noisy K-FAC on an unmodified LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast, final

from typing_extensions import Never, Unpack

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.fields import CallbackFields, KroneckerFields
from lightning_bayes.optim import KFAC, NoisyKFAC, PriorAt
from lightning_bayes.optim.kronecker.arguments import KroneckerHyperparameters
from lightning_bayes.optim.kronecker.kfac import check_prior_at

_OWN = KroneckerFields.__optional_keys__ - CallbackFields.__optional_keys__  # arguments that only K-FAC has
_OWN_DEFAULTS = {name: value for name, value in KroneckerHyperparameters.defaults().items() if name in _OWN}
_DEFAULTS = {"damping": 1e-3, **_OWN_DEFAULTS}
# With the user's step, the curvature only shapes the noise: half the work, with the same averaging time in updates.
_USER_STEP_DEFAULTS = {
    "stats_interval": 20,
    "inverse_interval": 200,
    "betas": (0.9, 0.9),
}


@final
class KFACCallback(VariationalCallback):
    """Trains with K-FAC (`lightning_bayes.KFAC`), without noise: it leaves no posterior.

    Without `lr` its own step is bounded by `optim.steps.trust_region`. Defaults: ``damping=1e-3`` and
    ``betas=(0.9, 0.95)``: β₁ weights the old momentum in each update, β₂ the old curvature in each measurement.

    Args:
        **fields: See `KroneckerFields` and `CallbackFields`.
    """

    optimizer_class = KFAC
    field_defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS

    def __init__(self, *unnamed: Never, **fields: Unpack[KroneckerFields]) -> None:
        super().__init__(*unnamed, **cast(CallbackFields, fields))


@final
class NoisyKFACCallback(VariationalCallback):
    """Trains with Noisy K-FAC (`lightning_bayes.NoisyKFAC`).

    ``Trainer(callbacks=[NoisyKFACCallback()])`` computes gradients at weight samples, lets the user's optimizer step, and
    stores a posterior in the checkpoint in which the weights of a layer are correlated. Defaults: ``damping=1e-3``,
    ``stats_interval=20``, ``inverse_interval=200`` and ``betas=(0.9, 0.9)``: β₁ weights the old momentum in each update, β₂
    the old curvature in each measurement. With ``lr``, the papers' step, the intervals are 10 and 100, and β₂ is 0.95.

    Args:
        prior_at: Where to evaluate the prior's gradient: at the ``"mean"``, or at the ``"sample"`` as in Zhang et al. 2018.
        **fields: See `KroneckerFields` and `CallbackFields`.
    """

    optimizer_class = NoisyKFAC
    field_defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS

    def __init__(self, *unnamed: Never, prior_at: PriorAt = "mean", **fields: Unpack[KroneckerFields]) -> None:
        check_prior_at(prior_at)
        if fields.get("lr") is None:
            fields = cast(KroneckerFields, {**_USER_STEP_DEFAULTS, **fields})
        super().__init__(*unnamed, **cast(CallbackFields, fields))
        self.optimizer_kwargs["prior_at"] = prior_at
