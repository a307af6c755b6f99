"""K-FAC and Noisy K-FAC on an unmodified LightningModule."""

from __future__ import annotations

from typing import Any, final

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bayes.callbacks import ranks
from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.optim import (
    KFAC,
    BetaSchedule,
    FisherName,
    KroneckerOptimizer,
    MeanFieldOptimizer,
    NoisyKFAC,
    PriorAt,
    Schedule,
)
from lightning_bayes.optim.fisher import check_fisher
from lightning_bayes.optim.kronecker.intervals import check_intervals
from lightning_bayes.optim.kronecker.kronecker_optimizer import DEFAULT_MAX_SIDE
from lightning_bayes.optim.kronecker.noisy_kfac import check_prior_at


class KroneckerCallback(VariationalCallback):
    """What the two callbacks share. What is measured where, and from which labels, is written to the log.

    Without `lr`, Noisy K-FAC lets the user's own optimizer move the mean (`optim.steps`) and shapes the posterior;
    K-FAC, which has no posterior, takes its own step within `optim.steps.trust_region`.

    Args:
        stats_interval: T_stats, updates between measurements of the curvature.
        inverse_interval: T_inv, updates between inversions of a layer's factors; layers take turns.
        max_side: Layers with a longer side of their matrix are treated as mean-field.
        fisher: ``"sampled"`` draws labels from the module's attribute ``likelihood``, for the Fisher; ``"empirical"`` takes
            the data's. None draws them where there is such an attribute.
        kl_clip: c, bound of the squared Fisher norm of the algorithm's own step; None for none.
        damping: γ, added to the curvature in the preconditioner.
        betas: (β₁, β₂), weights of the old momentum at each update and of the old curvature at each measurement.
        **arguments: See `VariationalCallback`.

    Raises:
        HyperparameterError: If an argument lies outside of its range.
    """

    def __init__(
        self,
        stats_interval: int = 10,
        inverse_interval: int = 100,
        max_side: int = DEFAULT_MAX_SIDE,
        fisher: FisherName | None = None,
        kl_clip: float | Schedule | None = None,
        damping: float | Schedule = 1e-3,
        betas: tuple[float, float] | BetaSchedule = (0.9, 0.95),
        **arguments: Any,
    ) -> None:
        check_intervals(stats_interval, inverse_interval)
        check_fisher(fisher)
        KroneckerOptimizer.hyperparameters.check({"kl_clip": kl_clip, "max_side": max_side})
        super().__init__(damping=damping, betas=betas, **arguments)
        self.group_defaults["kl_clip"] = kl_clip
        self.optimizer_kwargs |= {
            "stats_interval": stats_interval,
            "inverse_interval": inverse_interval,
            "max_side": max_side,
            "fisher": fisher,
        }

    def after_swap(self, trainer: Trainer, optimizer: MeanFieldOptimizer) -> None:
        """Share the inversions among ranks, and log what is measured where.

        Args:
            trainer: The trainer.
            optimizer: The new optimizer.
        """
        assert isinstance(optimizer, KroneckerOptimizer)
        optimizer.share_inversions(ranks.workers(trainer))
        rank_zero_info(optimizer.summary())


@final
class KFACCallback(KroneckerCallback):
    """Trains with K-FAC (`lightning_bayes.KFAC`), without noise; arguments as in `KroneckerCallback`."""

    optimizer_class = KFAC


@final
class NoisyKFACCallback(KroneckerCallback):
    """Trains with Noisy K-FAC (`lightning_bayes.NoisyKFAC`).

    ``Trainer(callbacks=[NoisyKFACCallback()])`` takes the user's gradients at samples, lets the user's optimizer step, and
    leaves a posterior in the checkpoint in which the weights of a layer are correlated.

    Args:
        prior_at: Where the prior's gradient is taken: at the ``"mean"``, or at the ``"sample"`` as in Zhang et al. 2018.
        **arguments: See `KroneckerCallback`.

    Raises:
        HyperparameterError: If an argument lies outside of its range.
    """

    optimizer_class = NoisyKFAC

    def __init__(self, prior_at: PriorAt = "mean", **arguments: Any) -> None:
        check_prior_at(prior_at)
        super().__init__(**arguments)
        self.optimizer_kwargs["prior_at"] = prior_at
