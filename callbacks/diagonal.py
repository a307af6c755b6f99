"""The callbacks of the mean-field methods: each names its optimizer and adds the arguments that only its method has."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, final, get_args

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import Never, Unpack

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.fields import CallbackFields
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim import (
    BBB,
    CVI,
    IVON,
    OGN,
    VOGN,
    VON,
    MomentumVON,
    NoisyAdam,
    NoisyAdamFisher,
    Positivity,
    ReparameterisedVON,
    Schedule,
    VadaGrad,
    Vadam,
    VariationalOptimizer,
    Vprop,
    Vprop0,
)
from lightning_bayes.optim.diagonal.ivon import check_rescaling
from lightning_bayes.optim.diagonal.ivon_start import weight_of_old_curvature
from lightning_bayes.optim.diagonal.vadagrad import require_unit_kl_weight
from lightning_bayes.optim.diagonal.vprop import Scaling

Hessian = Literal["exact", "reparameterised"]


@final
class VOGNCallback(VariationalCallback):
    """Trains with variational online Gauss-Newton (`lightning_bayes.VOGN`).

    ``Trainer(callbacks=[VOGNCallback()])`` replaces the user's optimizer, keeps its learning rate and schedule, and stores a
    Gaussian posterior over the weights in the checkpoint.
    """

    optimizer_class = VOGN


@final
class OGNCallback(VariationalCallback):
    """Trains with online Gauss-Newton (`lightning_bayes.OGN`), the deterministic baseline: it leaves no posterior."""

    optimizer_class = OGN


@final
class NoisyAdamCallback(VariationalCallback):
    """Trains with Noisy Adam (`lightning_bayes.NoisyAdam`): one backward pass of any layer, at Adam's cost.

    The width of the posterior depends on the batch size, see `optim.diagonal.estimators.batch_square`.
    """

    optimizer_class = NoisyAdam


@final
class NoisyAdamFisherCallback(VariationalCallback):
    """Trains with Noisy Adam on the Fisher diagonal (`lightning_bayes.NoisyAdamFisher`), computed by BackPACK."""

    optimizer_class = NoisyAdamFisher


@final
class VadamCallback(VariationalCallback):
    """Trains with variational Adam (`lightning_bayes.Vadam`): one backward pass of any layer, at Adam's cost.

    The width of the posterior depends on the batch size, see `optim.diagonal.estimators.batch_square`.
    """

    optimizer_class = Vadam


@final
class VadaGradCallback(VariationalCallback):
    """Trains with variational AdaGrad (`lightning_bayes.VadaGrad`), between inference and optimization.

    Default: ``betas=(0.0, 0.999)``, which is no momentum and, at temperature 1, the weight of the old curvature.

    Args:
        temperature: τ, from 1 (variational inference) to 0 (variational optimization, where the noise vanishes and leaves no
            posterior). May be a schedule.
        **fields: See `CallbackFields`; ``kl_weight`` must be 1.
    """

    optimizer_class = VadaGrad

    def __init__(self, *unnamed: Never, temperature: float | Schedule = 0.0, **fields: Unpack[CallbackFields]) -> None:
        super().__init__(*unnamed, **fields)
        self.set_own(temperature=temperature)
        require_unit_kl_weight(self.group_defaults)


@final
class VpropCallback(VariationalCallback):
    """Trains with variational RMSprop (`lightning_bayes.Vprop`): one backward pass of any layer.

    Default: ``betas=(0.0, 0.999)``, because the papers use no momentum. The posterior's width depends on the batch size, see
    `optim.diagonal.estimators.batch_square`.

    Args:
        scaling: ``"mean"`` (Khan et al. 2018) or ``"sum"`` (Khan et al. 2017, for all data in one batch).
        **fields: See `CallbackFields`.
    """

    optimizer_class = Vprop

    def __init__(self, *unnamed: Never, scaling: Scaling = "mean", **fields: Unpack[CallbackFields]) -> None:
        super().__init__(*unnamed, **fields)
        self.set_own(scaling=scaling)


@final
class Vprop0Callback(VariationalCallback):
    """Trains with Vprop without noise (`lightning_bayes.Vprop0`): it leaves no posterior.

    Args:
        scaling: ``"mean"`` (Khan et al. 2018) or ``"sum"`` (Khan et al. 2017, for all data in one batch).
        **fields: See `CallbackFields`.
    """

    optimizer_class = Vprop0

    def __init__(self, *unnamed: Never, scaling: Scaling = "mean", **fields: Unpack[CallbackFields]) -> None:
        super().__init__(*unnamed, **fields)
        self.set_own(scaling=scaling)


@final
class VONCallback(VariationalCallback):
    """Trains with variational online Newton (`lightning_bayes.VON`, `lightning_bayes.ReparameterisedVON`).

    Args:
        hessian: ``"exact"``, computed by BackPACK for the models that it supports; or ``"reparameterised"``, estimated from
            gradient and noise for any model.
        positivity: How the precision stays positive: ``"backtracking"`` or ``"correction"``, see `optim.diagonal.von`.
        **fields: See `CallbackFields`; ``engine`` has no effect.

    Raises:
        HyperparameterError: If `hessian` is unknown, or an argument lies outside of its range.
    """

    def __init__(
        self,
        *unnamed: Never,
        hessian: Hessian = "exact",
        positivity: Positivity = "backtracking",
        **fields: Unpack[CallbackFields],
    ) -> None:
        if hessian not in get_args(Hessian):
            raise HyperparameterError(f"hessian={hessian!r} must be one of {', '.join(map(repr, get_args(Hessian)))}.")
        self.hessian = hessian  # selects `optimizer_class`, which the base class reads
        super().__init__(*unnamed, **fields)
        self.set_own(positivity=positivity)

    @property
    def optimizer_class(self) -> type[VariationalOptimizer]:
        """The optimizer for the chosen Hessian."""
        return VON if self.hessian == "exact" else ReparameterisedVON


@final
class MomentumVONCallback(VariationalCallback):
    """Trains with variational online Newton and natural momentum (`lightning_bayes.MomentumVON`).

    Args:
        positivity: How the precision stays positive: ``"backtracking"`` or ``"correction"``, see `optim.diagonal.von`.
        **fields: See `CallbackFields`; ``engine`` has no effect.
    """

    optimizer_class = MomentumVON

    def __init__(
        self, *unnamed: Never, positivity: Positivity = "backtracking", **fields: Unpack[CallbackFields]
    ) -> None:
        super().__init__(*unnamed, **fields)
        self.set_own(positivity=positivity)


@final
class CVICallback(VariationalCallback):
    """Trains with conjugate-computation variational inference (`lightning_bayes.CVI`): VON with many samples per batch.

    Defaults: ``mc_samples=10`` and ``betas=(0.0, 0.999)``.

    Args:
        positivity: How the precision stays positive: ``"backtracking"`` or ``"correction"``, see `optim.diagonal.von`.
        **fields: See `CallbackFields`; ``engine`` has no effect.
    """

    optimizer_class = CVI

    def __init__(
        self, *unnamed: Never, positivity: Positivity = "backtracking", **fields: Unpack[CallbackFields]
    ) -> None:
        super().__init__(*unnamed, **fields)
        self.set_own(positivity=positivity)


@final
class IVONCallback(VariationalCallback):
    """Trains with improved variational online Newton (`lightning_bayes.IVON`): one backward pass of any layer.

    Default: ``betas=(0.9, 0.99999)``. β₂ is close to 1, as in the paper, because the curvature estimate is noisy.

    ``IVONCallback(lr=1.0)`` starts by itself: without an `init_precision` it chooses the initial noise, reads `lr` as SGD's
    learning rate divided by (1 - momentum), and, without `betas`, sets β₂ = 1 - 2/T for the T updates of the run. A
    heuristic, see `lightning_bayes.optim.diagonal.ivon_start`. Presets and an `init_precision` keep the paper's start.

    Args:
        clip_radius: Bound of each component of the natural step, before the learning rate is applied.
        rescale_lr: Whether to multiply an explicit `lr` by the initial curvature, which makes it comparable to SGD's. None:
            True without an `init_precision`. False without one starts at the square of the first gradient.
        **fields: See `CallbackFields`; ``engine`` has no effect.
    """

    optimizer_class = IVON

    def __init__(
        self,
        *unnamed: Never,
        clip_radius: float | Schedule = math.inf,
        rescale_lr: bool | None = None,
        **fields: Unpack[CallbackFields],
    ) -> None:
        super().__init__(*unnamed, **fields)
        self.set_own(clip_radius=clip_radius, rescale_lr=rescale_lr)
        check_rescaling(self.group_defaults)
        starts_by_itself = self.lr is not None and rescale_lr is not False and fields.get("init_precision") is None
        self._averages_over_run = starts_by_itself and "betas" not in fields

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Patch the trainer, and set β₂ by the length of the fit once its loaders are known."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self._averages_over_run:
            self._patches.set(
                trainer.strategy, "setup_optimizers", partial(self._set_average, trainer.strategy.setup_optimizers)
            )

    def _set_average(self, set_up: Callable[[Trainer], None], trainer: Trainer) -> None:
        updates = trainer.estimated_stepping_batches
        if math.isfinite(updates):
            self.group_defaults["betas"] = (self.group_defaults["betas"][0], weight_of_old_curvature(updates))
        set_up(trainer)


@final
class BBBCallback(VariationalCallback):
    """Trains with Bayes by Backprop (`lightning_bayes.BBB`): Adam on the bound's pathwise gradient.

    Args:
        std_lr: Learning rate of log σ. None uses the mean's learning rate, which is the user's if `lr` is None.
        **fields: See `CallbackFields`; ``engine`` has no effect.
    """

    optimizer_class = BBB

    def __init__(
        self, *unnamed: Never, std_lr: float | Schedule | None = None, **fields: Unpack[CallbackFields]
    ) -> None:
        super().__init__(*unnamed, **fields)
        self.set_own(std_lr=std_lr)
