"""Evaluation under a posterior that the callback, not the optimizer, stores: in memory and in its checkpoint state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import is_dataclass, replace
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bayes.callbacks.calibration import Calibration, beside
from lightning_bayes.callbacks.evaluation.base import EvaluationCallback, require_single_evaluation
from lightning_bayes.callbacks.evaluation.evaluated_posterior import is_mean_of
from lightning_bayes.callbacks.fit.resume import refuse_noisy_state, refuse_other_posterior, warn_of_kept
from lightning_bayes.callbacks.trainer.masks import renamed
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood import Raw
from lightning_bayes.optim.readout import POSTERIOR_KEY, stored_posterior
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive import Linearized, LinkArgument, PosteriorSamples, Samples, predictive_samples
from lightning_bayes.predictive.repeated import copied


class PosthocCallback(EvaluationCallback, ABC):
    """Evaluates a module under a posterior around its weights."""

    state_key = POSTERIOR_KEY  # the same for all callbacks of this kind, and for any arguments
    save_to: str | None = None
    settings: ClassVar[tuple[str, ...]] = ()  # arguments that made the posterior of a checkpoint

    def __init__(self, link: LinkArgument | None, eval_samples: int, linearized: Linearized, seed: int) -> None:
        if eval_samples < 0 or eval_samples != int(eval_samples):
            raise HyperparameterError(f"eval_samples={eval_samples!r} must be a whole number of at least 0.")
        if linearized not in {False, True, "closed_form"}:
            raise HyperparameterError(f"linearized={linearized!r} is unknown; use False, True or 'closed_form'.")
        super().__init__(link)
        self.eval_samples, self.linearized, self.seed = eval_samples, linearized, seed
        self._posterior: AbstractPosterior | None = None
        self._first_batch: Any = None  # of the current fit, as the loader yields it; None once it has been tried
        self._has_tried = False
        self._calibration: Calibration | None = Calibration.by_default(type(self).__name__, chooses=False)

    @abstractmethod
    def missing_posterior(self, trainer: Trainer, pl_module: LightningModule) -> AbstractPosterior | None:
        """Compute the posterior of weights that were loaded without one; None evaluates the network."""

    @property
    def posterior(self) -> AbstractPosterior | None:
        """The posterior of the last fit, checkpoint or evaluation, by the LightningModule's names; None before."""
        return self._posterior

    def keep(self, posterior: AbstractPosterior) -> None:
        """Evaluate under this posterior around the module's weights from now on."""
        self._posterior = posterior.to("cpu").with_likelihood(
            self.loss_likelihood if self.loss_likelihood.outputs else None
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Require that no other callback averages predictions in a fit, and let evaluation loops compute gradients."""
        super().setup(trainer, pl_module, stage)
        beside(trainer, self, self._calibration)
        if stage == "fit":
            require_single_evaluation(trainer)
        else:
            # The closed form needs gradients of the outputs, which torch.inference_mode disables for good.
            for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
                self._patches.set(loop, "inference_mode", False)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the first batch of a fit before the training step may change it in place."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._first_batch = None if self._has_tried else copied(batch)

    def find_samples(self, trainer: Trainer, pl_module: LightningModule) -> Samples | None:
        """Samples of the posterior of the module's weights; None without one."""
        if not self.eval_samples:
            return None
        if self._posterior is not None:
            self._posterior = renamed(self._posterior, pl_module.state_dict().keys())
        if self._posterior is None or not is_mean_of(self._posterior, pl_module.state_dict()):
            posterior = None if trainer.state.fn == "fit" else self.missing_posterior(trainer, pl_module)
            if posterior is None:
                return None
            self.keep(posterior)
            if self.save_to is not None:
                trainer.save_checkpoint(self.save_to)
                rank_zero_info(f"The checkpoint with its posterior is {self.save_to}")
        assert self._posterior is not None
        samples = PosteriorSamples(self._posterior.to(pl_module.device), self.eval_samples, self.seed)
        only = self.likelihood_of(pl_module).only
        return predictive_samples(samples, self.linearized, Raw() if only is None else only.kind)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The link, and the posterior without its constants, which are among the checkpoint's weights."""
        state = {"callback": type(self).__name__, **self.loss_state(), "settings": self._settings()}
        if self._posterior is not None:
            assert is_dataclass(self._posterior)
            without_constants = replace(self._posterior, constants={})
            state |= {"family": type(without_constants).__name__, "posterior": without_constants.state_dict()}
        return state

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Load the link and the posterior of a checkpoint, unless a noisy optimizer or another callback wrote it."""
        refuse = refuse_noisy_state if trainer.state.fn == "fit" else refuse_other_posterior
        refuse(checkpoint, type(self).__name__)
        state = checkpoint.get("callbacks", {}).get(POSTERIOR_KEY, {})
        self.load_loss_state(state)
        self._posterior = stored_posterior(checkpoint)
        if trainer.state.fn != "fit" and self._posterior is not None:
            kept = "the evaluation keeps the checkpoint's posterior, with"
            warn_of_kept(type(self).__name__, state.get("settings", {}), self._settings(), kept)

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.settings}
