"""Deep ensembles: of checkpoints, or trained one member after the other."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_bayes.callbacks.calibration import Calibration, beside, calibration_of
from lightning_bayes.callbacks.ensembles.member_fits import MemberFits, member_path
from lightning_bayes.callbacks.evaluation.base import EvaluationCallback
from lightning_bayes.callbacks.trainer.arguments import checked
from lightning_bayes.callbacks.trainer.fitted_weights import FittedWeights, checksum
from lightning_bayes.callbacks.trainer.neighbours import callbacks_of
from lightning_bayes.errors import HyperparameterError, PosteriorError
from lightning_bayes.likelihood.value import stored_likelihood
from lightning_bayes.optim.readout import POSTERIOR_KEY, callback_state, posterior_from_checkpoint, read_checkpoint
from lightning_bayes.predictive import LinkArgument, MemberPosteriors, MemberSamples, NetworkSamples, misfits

_CALIBRATION: Final = "calibration.pt"  # beside the members


@final
class DeepEnsembleCallback(EvaluationCallback):
    """Averages test, prediction and validation over M independently trained networks (Lakshminarayanan et al. 2017).

    https://arxiv.org/abs/1612.01474. A number trains them: with ``DeepEnsembleCallback(5)``, the fit is that of the first
    member; then four copies of the untouched module are fitted in the same way, on the same data and with copies of the
    callbacks that act in training, each from weights that every layer's `reset_parameters` draws anew. Loggers, and
    callbacks that only watch validation, see the first fit alone. A module that cannot be copied is built anew from the
    ``hyper_parameters`` that it has saved. Frozen layers keep their weights, so freeze what is pretrained; parameters of
    no such layer keep a constant start, such as zeros.

    Each fit saves its members' last weights in a folder of its own, in the run's folder `members`, and its checkpoints name
    it. A fit that is interrupted while it trains the members trains only those that are missing when it is resumed. To
    test in another process, pass ``ckpt_path=...`` from the fit.

    Paths combine networks that were trained before, by any config, each with another seed::

        for seed in 0 1 2 3 4; do
            lightning-bayes fit --config digits+lenet5+adam --seed_everything $seed
        done
        members=$(ls runs/digits_lenet5_adam/version_*/checkpoints/last.ckpt | paste -sd,)
        ensemble="--trainer.callbacks+=lightning_bayes.DeepEnsembleCallback --trainer.callbacks.members=[$members]"
        lightning-bayes test --config digits+lenet5+adam $ensemble

    The module's own weights are not used, and are restored afterwards. A member trained by a `VariationalCallback`
    contributes its posterior mean, or `samples` draws from its posterior. With members trained with `SWAGCallback`, this is
    Multi-SWAG (Wilson & Izmailov 2020, https://arxiv.org/abs/2002.08791). Validation during a fit is unchanged.

    Args:
        members: M, the number of networks to train; or the paths of M Lightning checkpoints.
        samples: Weight samples of each member's posterior; 0 uses its mean. Needs paths.
        seed: The seed of these samples, or of the members' initial weights.
        link: How outputs become predictions in evaluation. None: the module's attribute ``lightning_bayes_link``, else the
            link of the training loss, else raw outputs are averaged.
        calibrate: None: a classifier with labelled validation data gets a temperature once all members are trained; it is
            saved beside them. False leaves predictions as trained; True refuses fits that cannot have one.
        predict_once: Whether your ``predict_step`` runs once for each batch, with ``self(...)`` averaged inside; by default
            it runs under each sample.

    Raises:
        HyperparameterError: If `members` is neither a whole number of at least 2 nor a list of at least one path, or
            `samples` is not a whole number of at least 0.
        FileNotFoundError: If a checkpoint does not exist.
    """

    opt_out_hint = "remove DeepEnsembleCallback"
    stores_calibration = True

    @checked
    def __init__(
        self,
        members: int | Sequence[str | os.PathLike[str]],
        link: LinkArgument | None = None,
        samples: int = 0,
        seed: int = 0,
        calibrate: bool | None = None,
        predict_once: bool = False,
    ) -> None:
        if samples < 0 or samples != int(samples):
            raise HyperparameterError(f"samples={samples!r} must be a whole number of at least 0.")
        super().__init__(link)
        self.predict_once = predict_once
        self.samples, self.seed = samples, seed
        self._calibration = calibration_of(type(self).__name__, calibrate)
        self._has_trained = False  # all members, in the current fit
        self.members = _paths(members)
        self.fits: MemberFits | None = None
        self.folder: str | None = None  # of the members that this callback trains: each fit has a folder of its own
        self._checksums: list[int] = []  # of these members, once they are trained
        self._weights = FittedWeights()
        if isinstance(members, int):
            if samples:
                raise HyperparameterError(
                    f"samples={samples!r} needs members with posteriors, but members={members} trains plain networks. Pass "
                    "samples=0, or the paths of checkpoints from a VariationalCallback as members=[...]."
                )
            self.fits = MemberFits(members, seed)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Copy the module before a fit that trains members."""
        super().setup(trainer, pl_module, stage)
        beside(trainer, self, self._calibration)
        self._has_trained = False
        if self.fits is not None and stage == "fit":
            self.fits.prepare(trainer, pl_module)
            self._weights.forget()
            if trainer.ckpt_path is None:
                self.folder, self._checksums = None, []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose a folder for the members of this fit; a fit that resumes after its last update keeps the former one."""
        if self.fits is not None:
            self._choose_folder(trainer)

    def _choose_folder(self, trainer: Trainer) -> None:
        folder = Path(trainer.log_dir or trainer.default_root_dir) / "members" / uuid.uuid4().hex[:12]
        self.folder, self._checksums = str(folder.absolute()), []

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train the other members, and choose the temperature of their average."""
        if self.fits is not None:
            if self.folder is None:  # resumed after the last update of a fit without this callback
                self._choose_folder(trainer)
            assert self.folder is not None
            self._checksums = self.fits.run(trainer, Path(self.folder))
            self._weights.keep(pl_module)
            self._has_trained = bool(self._checksums)
            self._calibrate(trainer, pl_module, Path(self.folder))
        super().on_fit_end(trainer, pl_module)

    def _calibrate(self, trainer: Trainer, module: LightningModule, folder: Path) -> None:
        """Choose on the device of the fit, which Lightning has left, and save the choice beside the members."""
        for calibration in callbacks_of(trainer, Calibration) if self._has_trained else []:
            before = module.device
            module.to(trainer.strategy.root_device)
            try:
                calibration.end(trainer, module)
            finally:
                module.to(before)
            if calibration.scale is not None:
                torch.save(calibration.state_dict(), folder / _CALIBRATION)

    def find_samples(self, trainer: Trainer, pl_module: LightningModule) -> NetworkSamples | None:
        """The members, or samples of their posteriors; None in a fit, and in a trial run that has trained one network."""
        is_trial = self.fits is not None and trainer.fast_dev_run  # type: ignore[attr-defined]
        if (trainer.state.fn == "fit" and not self._has_trained) or is_trial:
            return None
        paths = self.members
        if self.fits is not None:
            if self._is_interrupted(self.fits.count):
                return None
            paths = self._trained(self.fits.count)
            if not self._weights.are_those_of(pl_module, type(self).__name__):
                return None
        self._load_calibration(trainer)
        # Load one at a time, because a checkpoint also holds the optimizer's state.
        if not self.samples:
            return MemberSamples([_weights(self._checkpoint(path, pl_module), pl_module) for path in paths])
        posteriors = [
            posterior_from_checkpoint(self._checkpoint(path, pl_module), path).to(pl_module.device) for path in paths
        ]
        return MemberPosteriors(posteriors, self.samples, self.seed)

    def _load_calibration(self, trainer: Trainer) -> None:
        """Restore what the end of the fit has saved beside the members."""
        path = Path(self.folder or "") / _CALIBRATION
        for calibration in callbacks_of(trainer, Calibration):
            if self.fits is not None and calibration.scale is None and trainer.state.fn != "fit" and path.is_file():
                calibration.load_state_dict(torch.load(path, weights_only=True))

    def _is_interrupted(self, count: int) -> bool:
        """Whether the last fit, in this process, has not trained all members, with a warning."""
        if self.folder is None or self._weights.is_kept:
            return False
        missing = sum(not member_path(self.folder, index).is_file() for index in range(count))
        rank_zero_warn(
            f"DeepEnsembleCallback evaluates at the module's current weights: its fit was interrupted, and {missing} of "
            f"{count} members are not trained. Resume the fit with ckpt_path=..."
        )
        return True

    def _trained(self, count: int) -> list[str]:
        """Paths of the members that a fit has trained."""
        if self.folder is None:
            raise PosteriorError(
                f"members={count} has trained no networks. Fit first, or pass ckpt_path=... from a fit with this callback, "
                "or the paths of checkpoints as members=[...]."
            )
        paths = [str(member_path(self.folder, index)) for index in range(count)]
        missing = [path for path in paths if not os.path.exists(path)]
        if missing:
            raise PosteriorError(
                f"{len(missing)} of {count} members are not trained ({missing[0]} does not exist): the fit was interrupted, "
                "or its folder has moved. Resume the fit with ckpt_path=..., or pass the paths of checkpoints as "
                "members=[...]."
            )
        for path, expected in zip(paths, self._checksums, strict=False):
            if checksum(read_checkpoint(path)["state_dict"]) != expected:
                raise PosteriorError(
                    f"The member {path} is not the one that the fit has trained: the file was replaced. Fit again, or pass "
                    "the paths of checkpoints as members=[...]."
                )
        return paths

    def state_dict(self) -> dict[str, Any]:
        """The link of the training loss, and where the members are that this callback trains."""
        if self.fits is None:
            return {}
        return {**self.loss_state(), "folder": self.folder, "checksums": self._checksums}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the link and the folder."""
        self.load_loss_state(state_dict)
        self.folder, self._checksums = state_dict.get("folder"), state_dict.get("checksums", [])
        self._weights.loaded()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Find the members beside the checkpoint if their folder has moved with it."""
        state = checkpoint.get("callbacks", {}).get(self.state_key, {})
        if state.get("folder") and not Path(state["folder"]).is_dir() and trainer.ckpt_path is not None:
            run = Path(*Path(state["folder"]).parts[-2:])
            near = [folder / run for folder in Path(trainer.ckpt_path).absolute().parents[:3]]
            state["folder"] = next((str(folder) for folder in near if folder.is_dir()), state["folder"])

    def _checkpoint(self, path: str, module: LightningModule) -> dict[str, Any]:
        checkpoint = read_checkpoint(path)
        mismatch = misfits(module, checkpoint["state_dict"])
        if mismatch:
            raise PosteriorError(
                f"The member {path} is not a {type(module).__name__} of this architecture ({mismatch}). Build the module "
                "with the arguments that the member was trained with."
            )
        states = (callback_state(checkpoint), checkpoint.get("callbacks", {}).get(POSTERIOR_KEY, {}))
        if not self.loss_likelihood.outputs:
            self.load_loss_state(next((state for state in states if stored_likelihood(state).outputs), {}))
        return checkpoint


def _weights(checkpoint: dict[str, Any], module: LightningModule) -> dict[str, Tensor]:
    weights = checkpoint["state_dict"].items()
    return {name: value.to(module.device) for name, value in weights if isinstance(value, Tensor)}


def _paths(members: Any) -> list[str]:
    """The paths among the argument `members`; none for a number."""
    if isinstance(members, (int, float)):
        if members < 2 or members != int(members) or isinstance(members, float):
            raise HyperparameterError(
                f"members={members!r} must be a whole number of at least 2, such as 5, or a list of checkpoint paths."
            )
        return []
    if isinstance(members, (str, os.PathLike)) or not members:
        raise HyperparameterError(
            f"members={members!r} must be a list of at least one checkpoint path, or the number of networks to train."
        )
    paths = [os.fspath(path) for path in members]
    for path in paths:
        if "://" not in path and not os.path.exists(path):
            raise FileNotFoundError(
                f"The member {path} does not exist. Pass the paths of existing checkpoints, or the number of networks to "
                "train, such as DeepEnsembleCallback(5)."
            )
    return paths
