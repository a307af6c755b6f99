"""Several modes in one fit: the weights at the ends of the cycles of a cyclic learning rate."""

from __future__ import annotations

import itertools
import math
from typing import Any, final

from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.calibration import beside, calibration_of
from lightning_bayes.callbacks.ensembles.cycles import CyclicRates, cycle_ends, rate_at
from lightning_bayes.callbacks.ensembles.mode_choice import ModeChoice
from lightning_bayes.callbacks.ensembles.mode_copies import (
    Mode,
    at_mode,
    copied,
    distance,
    held_by,
    members,
    with_constants,
)
from lightning_bayes.callbacks.evaluation.base import EvaluationCallback, require_single_evaluation
from lightning_bayes.callbacks.trainer.arguments import checked
from lightning_bayes.callbacks.trainer.checks import check_strategy
from lightning_bayes.callbacks.trainer.fitted_weights import FittedWeights
from lightning_bayes.callbacks.trainer.last_epoch import fit_kept, is_last_epoch
from lightning_bayes.callbacks.trainer.neighbours import callbacks_of
from lightning_bayes.errors import HyperparameterError, PosteriorError, UnsupportedTrainingError
from lightning_bayes.posteriors import FAMILIES, AbstractPosterior
from lightning_bayes.predictive import LinkArgument, MemberPosteriors, PosteriorSamples, Samples, misfits


@final
class MultiModeCallback(EvaluationCallback):
    """Averages predictions over several modes that one fit visits (Huang et al. 2017, https://arxiv.org/abs/1704.00109).

    The fit takes as many updates as without the callback. Your optimizer makes them, and the callback sets the learning rate
    of each: it warms up to `peak` times the largest rate of your schedule and falls to zero in a half-cosine, then restarts,
    once per mode. Where OneCycleLR cycles the momentum, it follows these cycles. At the end of each cycle the callback
    copies the weights and buffers, BatchNorm statistics included. Test and prediction average over these copies, and so does
    validation after the last cycle; earlier validation uses the current weights. Checkpoints hold all copies. With a
    validation set, evaluation averages over as many of the last copies as minimise its NLL, which may be one.

    Beside a `VariationalCallback`, each copy is a Gaussian posterior, and its `eval_samples` are divided among the modes::

        Trainer(callbacks=[VOGNCallback(), MultiModeCallback()])

    Args:
        num_modes: M, the number of cycles, and of networks in a prediction.
        peak: The largest learning rate, relative to that of your schedule. It takes the network from one mode to another.
        first: Fraction of the updates in the first cycle; the other cycles share the rest.
        link: How outputs become predictions. None: the module's attribute ``lightning_bayes_link``, else the link of the
            training loss, else raw outputs are averaged.
        calibrate: None: a classifier with labelled validation data gets a temperature at the end of the fit. False leaves
            predictions as trained; True refuses fits that cannot have a temperature. See `Calibration`.
        predict_once: Whether your ``predict_step`` runs once for each batch, with ``self(...)`` averaged inside; by default
            it runs under each sample.

    Raises:
        HyperparameterError: If an argument is out of range.
    """

    opt_out_hint = "remove MultiModeCallback"

    @checked
    def __init__(
        self,
        num_modes: int = 3,
        peak: float = 2.0,
        first: float = 0.5,
        link: LinkArgument | None = None,
        calibrate: bool | None = None,
        predict_once: bool = False,
    ) -> None:
        super().__init__(link)
        self.predict_once = predict_once
        self._calibration = calibration_of(type(self).__name__, calibrate)
        if num_modes < 2 or num_modes != int(num_modes) or not 0 < peak < math.inf or not 0 < first < 1:
            raise HyperparameterError(
                f"num_modes={num_modes!r} must be a whole number of at least 2, peak={peak!r} positive, and first={first!r} "
                "between 0 and 1."
            )
        self.num_modes, self.peak, self.first = int(num_modes), peak, first
        self.modes: list[Mode] = []
        self.posteriors: list[AbstractPosterior] = []  # around the modes, beside a `VariationalCallback`
        self.count: int | None = None  # of the last modes that are averaged; None for all
        self._choice = ModeChoice()
        self._rates = CyclicRates(peak)
        self._ends: tuple[int, ...] = ()  # updates after which the cycles end
        self._reached = 0  # update of the last copy
        self._weights = FittedWeights()

    # -- in a fit -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the modes of an earlier fit."""
        super().setup(trainer, pl_module, stage)
        if self.averages(trainer):
            beside(trainer, self, self._calibration)
        if stage == "fit":
            require_single_evaluation(trainer)
            _check_fit(trainer, pl_module)
            _check_samples(trainer)
            self.modes, self.posteriors, self._rates = [], [], CyclicRates(self.peak)
            self._ends, self._reached, self.count = (), 0, None
            self._weights.forget()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Divide the updates of the fit into cycles.

        Raises:
            HyperparameterError: If the fit has no end, or fewer than two updates per cycle.
        """
        updates = trainer.estimated_stepping_batches
        if math.isinf(updates) or updates < 0:
            raise HyperparameterError(
                f"MultiModeCallback divides the fit into {self.num_modes} cycles, but it has no end: max_epochs="
                f"{trainer.max_epochs} and max_steps={trainer.max_steps}, or a training loader without a length. Pass "
                "max_steps."
            )
        ends = cycle_ends(int(updates), self.num_modes, self.first)
        shortest = min(end - start for start, end in itertools.pairwise((0, *ends)))
        if shortest < 2 and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            raise HyperparameterError(
                f"num_modes={self.num_modes} and first={self.first:g} leave {shortest} of {updates} updates to a cycle. "
                "Train longer, or lower num_modes."
            )
        self._begin(trainer, ends)

    def _begin(self, trainer: Trainer, ends: tuple[int, ...]) -> None:
        if self._ends and self._ends != ends:
            rank_zero_warn(
                f"MultiModeCallback: the checkpoint's cycles end at updates {_listed(self._ends)}, those of this run at "
                f"{_listed(ends)}. The {len(self.modes)} modes found so far are kept."
            )
        self._ends, self._reached = ends, max(self._reached, trainer.global_step)
        rank_zero_info(
            f"MultiModeCallback: sets the learning rate. {self.num_modes} cycles end at updates {_listed(ends)}, each after "
            f"a peak of {self.peak:g} times the largest rate of your schedule. Predictions average over the networks found "
            "there."
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Set the rate of the update that this batch belongs to."""
        if self.averages(trainer):
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._rates.set(trainer.optimizers[0], schedulers, rate_at(trainer.global_step, self._ends))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Copy the network after the last update of a cycle."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if any(self._reached < end <= trainer.global_step for end in self._ends):
            self._reached = trainer.global_step
            self.modes.append(copied(pl_module, self.modes[-1] if self.modes else {}))
            self.posteriors += [
                at_mode(callback, self.modes[-1]) for callback in callbacks_of(trainer, VariationalCallback)
            ]

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loaders."""
        self._choice.keep(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the number of modes after the last epoch, before the checkpoint is written."""
        if is_last_epoch(trainer) and len(self.modes) > 1:
            callback = next(iter(callbacks_of(trainer, VariationalCallback)), self)
            with fit_kept(type(self).__name__, "the number of modes"):
                samples = members(pl_module, self.modes)
                self.count = self._choice.choose(trainer, pl_module, samples, callback.reader(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say how many modes were found, and how far apart they are."""
        found = f"MultiModeCallback: found {len(self.modes)} of {self.num_modes} modes"
        if len(self.modes) > 1:
            found += f"; their weights differ by {distance(pl_module, self.modes):.0%} of their norm"
        if trainer.global_step < self._ends[-1] and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(
                f"{found}. The fit ended after update {trainer.global_step} of {self._ends[-1]}, within a cycle."
            )
        else:
            rank_zero_info(f"{found}.")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep whose modes these are."""
        self._weights.keep(pl_module)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    @override
    def averages(self, trainer: Trainer) -> bool:
        return not callbacks_of(trainer, VariationalCallback)

    def finished_samples(self, trainer: Trainer, module: LightningModule, samples: Samples) -> Samples:
        """Samples of the posteriors around all modes instead of those around the last; see `FinishesSamples`."""
        if self.averages(trainer) or not self.posteriors:
            return samples
        if not isinstance(samples, PosteriorSamples):
            raise UnsupportedTrainingError(
                "MultiModeCallback samples networks around each mode, but the predictive is linearised around one. Pass "
                "linearized=False to the variational callback, and put Calibration behind MultiModeCallback."
            )
        if any(posterior.mean.keys() != samples.posterior.mean.keys() for posterior in self.posteriors):
            rank_zero_warn(
                "MultiModeCallback evaluates the last mode alone: the trained parameters changed their names."
            )
            return samples
        posteriors = [posterior.to(module.device) for posterior in self.posteriors[-(self.count or 0) :]]
        return MemberPosteriors(posteriors, -(-samples.count // len(posteriors)), samples.seed)

    def find_samples(self, trainer: Trainer, pl_module: LightningModule) -> Samples | None:
        """The modes; None in a fit before the last one, and with a warning without any."""
        if not self.averages(trainer):
            return None
        has_all = bool(self._ends) and self._reached >= self._ends[-1]
        if trainer.state.fn == "fit" and not has_all:
            return None
        if not self.modes:
            rank_zero_warn(
                "MultiModeCallback evaluates at the module's current weights: no mode was found or loaded. Pass "
                "ckpt_path=... from a fit with this callback that ended its first cycle."
            )
            return None
        if trainer.state.fn != "fit" and not self._weights.are_those_of(pl_module, type(self).__name__):
            return None
        if not has_all and not self._weights.is_of_fit:
            rank_zero_warn(
                f"MultiModeCallback averages over {len(self.modes)} of {self.num_modes} modes: the fit ended within a cycle."
            )
        mismatch = misfits(pl_module, held_by(pl_module, self.modes[-1]))
        if mismatch and self._weights.is_of_fit:  # changed in `on_train_end`
            rank_zero_warn(
                f"MultiModeCallback evaluates at the module's current weights: its layers changed ({mismatch})."
            )
            return None
        if mismatch:
            raise PosteriorError(
                f"The modes are not networks of this {type(pl_module).__name__} ({mismatch}). Build the module with the "
                "arguments that it was trained with."
            )
        return members(pl_module, self.modes[-(self.count or 0) :])

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The modes, and what a resumed fit needs to go on with the same rates."""
        return {
            **self.loss_state(),
            "modes": self.modes,
            "posteriors": [(type(q).__name__, with_constants(q, {}).state_dict()) for q in self.posteriors],
            "count": self.count,
            "peaks": self._rates.peaks,
            "ends": self._ends,
            "reached": self._reached,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.load_loss_state(state_dict)
        self._weights.loaded()
        self.modes, self.count = list(state_dict["modes"]), state_dict["count"]
        self.posteriors = [
            with_constants(FAMILIES[family].from_state_dict(state), mode)
            for (family, state), mode in zip(state_dict["posteriors"], self.modes, strict=False)
        ]
        self._rates.peaks = list(state_dict["peaks"])
        self._ends, self._reached = tuple(state_dict["ends"]), state_dict["reached"]


def _check_fit(trainer: Trainer, module: LightningModule) -> None:
    """Require a fit whose updates Lightning makes, on whole parameters."""
    if not module.automatic_optimization:
        raise UnsupportedTrainingError(
            f"{type(module).__name__} uses manual optimization, where the callback sees no updates. Set the cyclic learning "
            "rate in training_step, copy the weights at the end of each cycle, and average with MemberSamples."
        )
    check_strategy(trainer)


def _check_samples(trainer: Trainer) -> None:
    """Require samples of a posterior beside which there are several modes."""
    for callback in callbacks_of(trainer, VariationalCallback):
        if not callback.eval_samples:
            raise HyperparameterError(
                f"{type(callback).__name__}(eval_samples=0) evaluates the last mode alone. Pass at least one sample per "
                "mode, or leave the callback out."
            )


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
