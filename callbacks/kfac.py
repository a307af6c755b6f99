"""K-FAC and Noisy K-FAC on an unmodified LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast, final

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import Unpack

from lightning_bayes.callbacks import ranks
from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.fields import CallbackFields, KroneckerFields
from lightning_bayes.optim import KFAC, MeanFieldOptimizer, NoisyKFAC, PriorAt
from lightning_bayes.optim.kronecker.arguments import KroneckerHyperparameters
from lightning_bayes.optim.kronecker.family import KroneckerFamily
from lightning_bayes.optim.kronecker.kfac import check_prior_at

_DAMPING = 1e-3  # γ
_KFAC_ONLY = KroneckerFields.__optional_keys__ - CallbackFields.__optional_keys__
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
    field_defaults: ClassVar[Mapping[str, Any]] = {"damping": _DAMPING}

    def __init__(self, **fields: Unpack[KroneckerFields]) -> None:
        shared, kfac_only = _split(fields)
        super().__init__(**shared)
        _set_own(self, kfac_only)

    def after_swap(self, trainer: Trainer, optimizer: MeanFieldOptimizer) -> None:
        """Share the inversions among ranks, and log how each layer is measured."""
        _share_inversions(trainer, optimizer)


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
    field_defaults: ClassVar[Mapping[str, Any]] = {"damping": _DAMPING}

    def __init__(self, prior_at: PriorAt = "mean", **fields: Unpack[KroneckerFields]) -> None:
        check_prior_at(prior_at)
        if fields.get("lr") is None:
            fields = cast(KroneckerFields, {**_USER_STEP_DEFAULTS, **fields})
        shared, kfac_only = _split(fields)
        super().__init__(**shared)
        _set_own(self, kfac_only)
        self.optimizer_kwargs["prior_at"] = prior_at

    def after_swap(self, trainer: Trainer, optimizer: MeanFieldOptimizer) -> None:
        """Share the inversions among ranks, and log how each layer is measured."""
        _share_inversions(trainer, optimizer)


def _split(fields: KroneckerFields) -> tuple[CallbackFields, dict[str, Any]]:
    """The shared arguments, and the arguments that only K-FAC has, with defaults filled in."""
    shared = {name: value for name, value in fields.items() if name not in _KFAC_ONLY}
    values = {**KroneckerHyperparameters.defaults(), **fields}
    own = {name: values[name] for name in _KFAC_ONLY}
    KroneckerHyperparameters.check({**own, "engine": values["engine"]})
    return cast(CallbackFields, shared), own


def _set_own(callback: VariationalCallback, kfac_only: dict[str, Any]) -> None:
    callback.set_own(kl_clip=kfac_only["kl_clip"])
    callback.optimizer_kwargs |= {name: value for name, value in kfac_only.items() if name != "kl_clip"}


def _share_inversions(trainer: Trainer, optimizer: MeanFieldOptimizer) -> None:
    assert isinstance(optimizer.family, KroneckerFamily)
    optimizer.family.workers = ranks.workers(trainer)
    rank_zero_info(optimizer.family.layers.describe())
