"""The seam between Lightning and the optimizers: one base class for the callbacks of the family.

What happens when (every point is measured, see the design): in `setup` the strategy's ``setup_optimizers`` is wrapped, so
that the user's optimizer is swapped after Lightning normalised it and before anything is restored into it; Lightning's
closure becomes a `MonteCarloClosure`; on teardown **and** on exceptions (where Lightning calls no teardown) all is undone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_bayes.callbacks import checks, swap
from lightning_bayes.callbacks.closure import MonteCarloClosure
from lightning_bayes.callbacks.evaluation import PosteriorEvaluation
from lightning_bayes.callbacks.num_data import infer_num_data
from lightning_bayes.curvature import EngineName, LossReduction
from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim import MeanFieldOptimizer
from lightning_bayes.optim.hyper import check as check_hyperparameters
from lightning_bayes.optim.trust_region import RELATIVE_NOISE
from lightning_bayes.posteriors import CALLBACK_KEY, MeanField, group_arguments, posterior_from_checkpoint
from lightning_bayes.predictive import Link, PosteriorSamples, check_link

_LARGE_PRIOR = 10.0  # a prior precision that hurt on small networks


class VariationalCallback(Callback, ABC):
    """Turns training of an unmodified LightningModule into variational inference.

    Args:
        lr: Learning rate α of the paper's natural step. None: the user's own learning rate bounds the step (a trust
            region, see `optim.trust_region`; a heuristic). Schedulers act on either.
        mc_samples: K, weight samples per batch and process in training.
        eval_samples: S, weight samples in validation, test and prediction; 0 evaluates at the posterior mean.
        prior_precision: δ of the prior N(0, 1/δ). None: from the optimizer's L2 ``weight_decay`` (δ = Ñ·wd/τ), else 1.
        kl_weight: τ, weight of the KL term in the variational bound; below 1 gives a cold posterior.
        kl_warmup_steps: Updates over which τ grows linearly from a tenth to `kl_weight`; 0 for none.
        data_augmentation_factor: ρ; data augmentation makes N examples count as ρN.
        damping: γ, added to the curvature in the preconditioner.
        init_precision: Posterior precision before the first update; None takes the first batch's curvature.
        betas: (β₁, β₂), weights of the old momentum and of the old curvature, as in Adam.
        num_data: N, number of training examples; None asks the trainer's data loader.
        engine: ``"fused"`` measures any layer; ``"backpack"`` is BackPACK, for the layers it knows.
        relative_noise: Upper bound of the noise in units of each tensor's size. None: 0.3 with the default step, no bound
            with an explicit `lr`.
        damping_in_noise: Whether γ counts in the posterior precision too.
        loss_reduction: ``"auto"`` reads from the loss's graph whether it is a mean or a sum over examples.
        link: How outputs become predictions in evaluation. None: the module's attribute ``link``, else ``"softmax"``.
        seed: Seed of the noise.
        max_nonfinite_steps: Updates in a row that may be skipped for a gradient that is not finite.

    Raises:
        HyperparameterError: If an argument lies outside of its range.
    """

    def __init__(
        self,
        lr: float | None = None,
        mc_samples: int = 1,
        eval_samples: int = 10,
        prior_precision: float | None = None,
        kl_weight: float = 1.0,
        kl_warmup_steps: int = 0,
        data_augmentation_factor: float = 1.0,
        damping: float = 0.0,
        init_precision: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        num_data: int | None = None,
        engine: EngineName = "fused",
        relative_noise: float | None = None,
        damping_in_noise: bool = False,
        loss_reduction: LossReduction = "auto",
        link: Link | None = None,
        seed: int = 0,
        max_nonfinite_steps: int = 10,
    ) -> None:
        arguments = {k: v for k, v in locals().items() if k not in {"self", "__class__"}}
        check_hyperparameters(arguments)
        if link is not None:
            check_link(link)
        self.lr, self.mc_samples, self.eval_samples, self.num_data = lr, mc_samples, eval_samples, num_data
        self.prior_precision, self.link, self.seed = prior_precision, link, seed
        self.options: dict[str, Any] = {
            "betas": tuple(betas),
            "kl_weight": kl_weight,
            "kl_warmup_steps": kl_warmup_steps,
            "data_augmentation_factor": data_augmentation_factor,
            "damping": damping,
            "damping_in_noise": damping_in_noise,
            "init_precision": init_precision,
            "relative_noise": RELATIVE_NOISE if relative_noise is None and lr is None else relative_noise,
            "step_rule": "natural" if lr is not None else "trust_region",
        }
        self.building: dict[str, Any] = {
            "engine": engine,
            "loss_reduction": loss_reduction,
            "mc_samples": mc_samples,
            "seed": seed,
            "max_nonfinite_steps": max_nonfinite_steps,
        }
        self.optimizer: MeanFieldOptimizer | None = None
        self._posterior: MeanField | None = None
        self._names: dict[nn.Parameter, str] = {}
        self._undo = ExitStack()
        self._evaluation: PosteriorEvaluation | None = None

    @property
    @abstractmethod
    def optimizer_class(self) -> type[MeanFieldOptimizer]:
        """The optimizer that takes the place of the user's."""

    @property
    def state_key(self) -> str:
        """One key for the family and for any arguments, so that a run can be resumed with other arguments."""
        return CALLBACK_KEY

    # -- the swap -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare the swap for fitting.

        Args:
            trainer: The trainer.
            pl_module: The user's module.
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """
        self._restore()
        if stage != "fit":
            return
        checks.check_training(trainer, pl_module)
        strategy, loop = trainer.strategy, trainer.fit_loop.epoch_loop.automatic_optimization
        set_up, make_closure = strategy.setup_optimizers, loop._make_closure

        def setup_optimizers(trainer: Trainer) -> None:
            set_up(trainer)
            self._swap(trainer, pl_module)

        def make_monte_carlo_closure(kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
            return self._closure(trainer, make_closure(kwargs, optimizer, batch_idx))

        strategy.setup_optimizers = setup_optimizers  # type: ignore[method-assign]
        loop._make_closure = make_monte_carlo_closure  # type: ignore[method-assign]
        self._undo.callback(strategy.__dict__.pop, "setup_optimizers", None)
        self._undo.callback(loop.__dict__.pop, "_make_closure", None)

    def _swap(self, trainer: Trainer, pl_module: LightningModule) -> None:
        checks.check_training(trainer, pl_module)  # again: configure_model and other callbacks ran since
        strategy = trainer.strategy
        old = swap.check_swappable(strategy.optimizers, self.lr is not None)
        schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
        cycles = any(getattr(scheduler, "cycle_momentum", False) for scheduler in schedulers)
        groups = swap.converted_groups(old, self.lr, cycles)
        new = self.optimizer_class(
            pl_module,
            groups,
            lr=groups[0]["lr"],
            prior_precision=self.prior_precision or 1.0,
            **{key: groups[0][key] for key in ("radius", "momentum", "weight_decay")},  # for groups added later
            **self.options,
            **self.building,
        )
        new.samples_in_closure = True
        swap.rebind_schedulers(schedulers, old, new)
        strategy.optimizers = [new]
        self.optimizer = new
        self._posterior = None
        self._names = {param: name for name, param in pl_module.named_parameters()}

    def _closure(self, trainer: Trainer, base: Any) -> Any:
        optimizer = trainer.strategy.optimizers[0]
        if not isinstance(optimizer, MeanFieldOptimizer):
            return base
        self._fix_num_data(trainer, optimizer)
        first = trainer.global_rank * self.mc_samples  # every process draws noise of its own
        samples = [first + k for k in range(self.mc_samples)]
        return MonteCarloClosure(base, trainer, optimizer, samples)

    def _fix_num_data(self, trainer: Trainer, optimizer: MeanFieldOptimizer) -> None:
        """Set N, and the prior that an L2 penalty stands for, once the data loader exists."""
        if optimizer.defaults["num_data"] is not None:
            return
        optimizer.defaults["num_data"] = self.num_data or infer_num_data(trainer)  # later groups inherit it
        for group in optimizer.param_groups:
            if group["num_data"] is None:
                group["num_data"] = optimizer.defaults["num_data"]
                self._take_prior_from_penalty(group)

    def _take_prior_from_penalty(self, group: dict[str, Any]) -> None:
        if self.prior_precision is not None or not group.get("l2_penalty"):
            return
        counted = group_arguments(group)
        group["prior_precision"] = group["l2_penalty"] * counted["num_data"] / group["kl_weight"]  # δ̃ = wd
        if group["prior_precision"] > _LARGE_PRIOR:
            rank_zero_warn(
                f"weight_decay={group['l2_penalty']:g} over {counted['num_data']:g} examples is the prior precision "
                f"{group['prior_precision']:.4g}, which is strong. Pass prior_precision=1.0 to choose another prior."
            )

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Names of the optimizer's parameters, in its order: what makes its state a posterior by name."""
        if self.optimizer is None:
            return {}
        names = [[self._names[p] for p in group["params"]] for group in self.optimizer.param_groups]
        return {"format": 1, "param_names": names}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the mean even if the save comes from inside a pass, such as from a signal handler.

        Args:
            trainer: The trainer.
            pl_module: The module.
            checkpoint: What will be written.
        """
        mean = self.optimizer.sampled_mean() if self.optimizer is not None else {}
        for name, param in pl_module.named_parameters(remove_duplicate=False):
            if param in mean and name in checkpoint["state_dict"]:
                checkpoint["state_dict"][name] = mean[param]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Check that a run can be resumed, or take the posterior for evaluation.

        Args:
            trainer: The trainer.
            pl_module: The module.
            checkpoint: What was read.

        Raises:
            PosteriorError: If a fit shall be resumed from a checkpoint without the state of a noisy optimizer.
        """
        groups = [group for state in checkpoint.get("optimizer_states", []) for group in state["param_groups"]]
        if trainer.state.fn == "fit":
            if not groups or "noise_seed" not in groups[0]:
                raise PosteriorError(
                    f"The checkpoint was not written with {type(self).__name__}, so it holds no posterior to resume. To "
                    "start from its weights, load them into the module and fit without ckpt_path."
                )
            return
        try:
            self._posterior = posterior_from_checkpoint(checkpoint)
        except PosteriorError as error:
            self._posterior = None
            if self._averages():
                rank_zero_warn(f"{error} Evaluation uses the checkpoint's weights as they are.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what a resumed run takes from the checkpoint rather than from this callback.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        if self.optimizer is None or not self.optimizer.num_updates:
            return
        group, wanted = self.optimizer.param_groups[0], dict(self.options)
        self.optimizer.defaults["num_data"] = group["num_data"]
        wanted["noise_seed"] = self.seed
        wanted["num_data"] = self.num_data or infer_num_data(trainer)
        changed = [f"{k}={group[k]!r} (now {v!r})" for k, v in wanted.items() if group[k] != v]
        if changed:
            rank_zero_warn(f"The resumed run keeps the checkpoint's {', '.join(changed)}.")

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _averages(self) -> bool:
        return self.eval_samples > 0 and self.optimizer_class.noisy

    def _start_evaluation(self, trainer: Trainer, pl_module: LightningModule, predict: bool = False) -> None:
        if trainer.sanity_checking or not self._averages():
            return
        posterior = self._posterior_now(trainer, pl_module)
        if posterior is None:
            return
        samples = PosteriorSamples(posterior.to(pl_module.device), self.eval_samples, self.seed)
        self._evaluation = PosteriorEvaluation(pl_module, samples, self.link)
        self._evaluation.start(predict)

    def _posterior_now(self, trainer: Trainer, pl_module: LightningModule) -> MeanField | None:
        if trainer.state.fn == "fit":
            started = self.optimizer is not None and self.optimizer.num_updates > 0
            return self.optimizer.posterior() if self.optimizer is not None and started else None
        weights = pl_module.state_dict()
        kept = self._posterior
        if kept is not None and all(torch.equal(weights[n].cpu(), mean.cpu()) for n, mean in kept.mean.items()):
            return kept
        why = "no posterior was trained or loaded" if kept is None else "the weights are not the mean of its posterior"
        rank_zero_warn(f"{type(self).__name__} evaluates at the weights as they are: {why}. Pass ckpt_path=...")
        return None

    def _stop_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.stop()
            self._evaluation = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average over the posterior from here."""
        self._start_evaluation(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back to the module's own forward."""
        self._stop_evaluation()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average over the posterior from here."""
        self._start_evaluation(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back to the module's own forward."""
        self._stop_evaluation()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average over the posterior from here."""
        self._start_evaluation(trainer, pl_module, predict=True)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back to the module's own forward."""
        self._stop_evaluation()

    # -- the record and the end ---------------------------------------------------------------------------------------

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the share of weights whose noise the relative floor sets, and the number of skipped updates.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        if self.optimizer is None or trainer.barebones:
            return
        share = float(self.optimizer.floored_share())
        if self.optimizer.noisy:
            pl_module.log("posterior/floored_share", share, sync_dist=True)
        pl_module.log("posterior/skipped_updates", float(self.optimizer.skipped_steps), sync_dist=True)
        if share > 0.5 and trainer.current_epoch == 0:
            rank_zero_info(
                f"{share:.0%} of the weights have their noise set by relative_noise={self.options['relative_noise']} and "
                "not by the data: at this many examples their curvature alone would allow noise larger than that share "
                "of the weights' own size. The noise is then a heuristic scale, not the posterior's width."
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the posterior for tests and predictions in this process.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        if self.optimizer is not None and self.optimizer.num_updates and self._averages():
            self._posterior = self.optimizer.posterior().to("cpu")

    def _restore(self) -> None:
        self._stop_evaluation()
        self._undo.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo what `setup` did.

        Args:
            trainer: The trainer.
            pl_module: The module.
            stage: The stage that ends.
        """
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo what `setup` did; Lightning calls no teardown after an exception.

        Args:
            trainer: The trainer.
            pl_module: The module.
            exception: What happened.
        """
        self._restore()
