"""The callbacks of the mean-field methods: each names its optimizer and adds the arguments that only its method has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, cast, final, get_args

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import Never, Unpack

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.fit.closure import MonteCarloClosure
from lightning_bayes.callbacks.fit.fields import CallbackFields
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
    ReparameterisedVON,
    VadaGrad,
    Vadam,
    VariationalOptimizer,
    Vprop,
    Vprop0,
)
from lightning_bayes.optim.diagonal.bbb import BBBOwn
from lightning_bayes.optim.diagonal.ivon import IVONOwn
from lightning_bayes.optim.diagonal.ivon_start import weight_of_old_curvature
from lightning_bayes.optim.diagonal.vadagrad import VadaGradOwn
from lightning_bayes.optim.diagonal.von import NewtonOwn
from lightning_bayes.optim.diagonal.vprop import VpropOwn
from lightning_bayes.optim.settings import joined_help

Hessian = Literal["exact", "reparameterised"]


class _VadaGradFields(CallbackFields, VadaGradOwn, total=False):
    __doc__ = joined_help(CallbackFields, VadaGradOwn)  # type: ignore[misc]


class _VpropFields(CallbackFields, VpropOwn, total=False):
    __doc__ = joined_help(CallbackFields, VpropOwn)  # type: ignore[misc]


class _NewtonFields(CallbackFields, NewtonOwn, total=False):
    __doc__ = joined_help(CallbackFields, NewtonOwn)  # type: ignore[misc]


class _IVONFields(CallbackFields, IVONOwn, total=False):
    __doc__ = joined_help(CallbackFields, IVONOwn)  # type: ignore[misc]


class _BBBFields(CallbackFields, BBBOwn, total=False):
    __doc__ = joined_help(CallbackFields, BBBOwn)  # type: ignore[misc]


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

    The width of the posterior depends on the batch size, see `optim.diagonal.batch_square`.
    """

    optimizer_class = NoisyAdam


@final
class NoisyAdamFisherCallback(VariationalCallback):
    """Trains with Noisy Adam on the Fisher diagonal (`lightning_bayes.NoisyAdamFisher`), computed by BackPACK."""

    optimizer_class = NoisyAdamFisher


@final
class VadamCallback(VariationalCallback):
    """Trains with variational Adam (`lightning_bayes.Vadam`): one backward pass of any layer, at Adam's cost.

    The width of the posterior depends on the batch size, see `optim.diagonal.batch_square`.
    """

    optimizer_class = Vadam


@final
class VadaGradCallback(VariationalCallback):
    """Trains with variational AdaGrad (`lightning_bayes.VadaGrad`), between inference and optimization.

    Default: ``betas=(0.0, 0.999)``, which is no momentum and, at temperature 1, the weight of the old curvature.
    """

    optimizer_class = VadaGrad

    def __init__(self, *unnamed: Never, **fields: Unpack[_VadaGradFields]) -> None:
        super().__init__(*unnamed, **cast(CallbackFields, fields))


@final
class VpropCallback(VariationalCallback):
    """Trains with variational RMSprop (`lightning_bayes.Vprop`): one backward pass of any layer.

    Default: ``betas=(0.0, 0.999)``, because the papers use no momentum. The posterior's width depends on the batch size, see
    `optim.diagonal.batch_square`.
    """

    optimizer_class = Vprop

    def __init__(self, *unnamed: Never, **fields: Unpack[_VpropFields]) -> None:
        super().__init__(*unnamed, **cast(CallbackFields, fields))


@final
class Vprop0Callback(VariationalCallback):
    """Trains with Vprop without noise (`lightning_bayes.Vprop0`): it leaves no posterior."""

    optimizer_class = Vprop0

    def __init__(self, *unnamed: Never, **fields: Unpack[_VpropFields]) -> None:
        super().__init__(*unnamed, **cast(CallbackFields, fields))


@final
class VONCallback(VariationalCallback):
    """Trains with variational online Newton (`lightning_bayes.VON`, `lightning_bayes.ReparameterisedVON`).

    Args:
        hessian: ``"exact"``, computed by BackPACK for the models that it supports; or ``"reparameterised"``, estimated from
            gradient and noise for any model.
        **fields: As listed below; ``engine`` has no effect.

    Raises:
        HyperparameterError: If `hessian` is unknown, or an argument lies outside of its range.
    """

    optimizer_class: type[VariationalOptimizer] = VON

    def __init__(self, *unnamed: Never, hessian: Hessian = "exact", **fields: Unpack[_NewtonFields]) -> None:
        if hessian not in get_args(Hessian):
            raise HyperparameterError(f"hessian={hessian!r} must be one of {', '.join(map(repr, get_args(Hessian)))}.")
        self.hessian = hessian
        self.optimizer_class = VON if hessian == "exact" else ReparameterisedVON  # the base class reads it
        super().__init__(*unnamed, **cast(CallbackFields, fields))


@final
class MomentumVONCallback(VariationalCallback):
    """Trains with variational online Newton and natural momentum (`lightning_bayes.MomentumVON`)."""

    optimizer_class = MomentumVON

    def __init__(self, *unnamed: Never, **fields: Unpack[_NewtonFields]) -> None:
        super().__init__(*unnamed, **cast(CallbackFields, fields))


@final
class CVICallback(VariationalCallback):
    """Trains with conjugate-computation variational inference (`lightning_bayes.CVI`): VON with many samples per batch.

    Defaults: ``mc_samples=10`` and ``betas=(0.0, 0.999)``.
    """

    optimizer_class = CVI

    def __init__(self, *unnamed: Never, **fields: Unpack[_NewtonFields]) -> None:
        super().__init__(*unnamed, **cast(CallbackFields, fields))


@final
class IVONCallback(VariationalCallback):
    """Trains with improved variational online Newton (`lightning_bayes.IVON`): one backward pass of any layer.

    Default: ``betas=(0.9, 0.99999)``. β₂ is close to 1, as in the paper, because the curvature estimate is noisy.

    ``IVONCallback(lr=1.0)`` starts by itself: without an `init_precision` it chooses the initial noise, reads `lr` as SGD's
    learning rate divided by (1 - momentum), and, without `betas`, sets β₂ = 1 - 2/T for the T updates of the run. A
    heuristic, see `lightning_bayes.optim.diagonal.ivon_start`. Presets and an `init_precision` keep the paper's start.
    """

    optimizer_class = IVON

    def __init__(self, *unnamed: Never, **fields: Unpack[_IVONFields]) -> None:
        super().__init__(*unnamed, **cast(CallbackFields, fields))
        is_stated = fields.get("rescale_lr") is False or fields.get("init_precision") is not None
        self._averages_over_run = self.lr is not None and not is_stated and "betas" not in fields

    def _set_up_and_swap(
        self,
        set_up: Callable[[Trainer], None],
        pl_module: LightningModule,
        closure: MonteCarloClosure,
        trainer: Trainer,
    ) -> None:
        """Set β₂ by the length of the fit, whose loaders are known by now."""
        if self._averages_over_run and math.isfinite(updates := trainer.estimated_stepping_batches):
            self.group_defaults["betas"] = (self.group_defaults["betas"][0], weight_of_old_curvature(updates))
        super()._set_up_and_swap(set_up, pl_module, closure, trainer)


@final
class BBBCallback(VariationalCallback):
    """Trains with Bayes by Backprop (`lightning_bayes.BBB`): Adam on the bound's pathwise gradient."""

    optimizer_class = BBB

    def __init__(self, *unnamed: Never, **fields: Unpack[_BBBFields]) -> None:
        super().__init__(*unnamed, **cast(CallbackFields, fields))
