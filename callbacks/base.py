"""The seam between Lightning and the optimizers: one base class for the callbacks of the family.

What happens when (every point is measured, see the design): in `setup` the strategy's ``setup_optimizers`` is wrapped, so
that the user's optimizer is swapped after Lightning normalised it and before anything is restored into it; Lightning's
closure becomes a `MonteCarloClosure`; on teardown **and** on exceptions (where Lightning calls no teardown) all is undone.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_bayes.callbacks import checks, ranks, resume, swap
from lightning_bayes.callbacks.checkpoint_io import take_plain_numbers, use_whole_files
from lightning_bayes.callbacks.closure import MonteCarloClosure
from lightning_bayes.callbacks.evaluating import EvaluatingCallback
from lightning_bayes.callbacks.noise import DefaultNoise
from lightning_bayes.callbacks.num_data import infer_num_data, warn_of_other_examples, with_augmentation_factor
from lightning_bayes.callbacks.presets import Preset, find_preset, presets_of
from lightning_bayes.callbacks.whole_or_nothing import WholeOrNothing
from lightning_bayes.curvature import EngineName, LossReduction, check_names
from lightning_bayes.optim import BetaSchedule, MeanFieldOptimizer, PriorMean, Schedule, value_at
from lightning_bayes.optim.hyperparameters import effective
from lightning_bayes.optim.settings import plain
from lightning_bayes.optim.steps.base_optimizer import NOISE_OF_CLASSIFIERS, NOISE_OF_OTHERS, PRIOR_PRECISION
from lightning_bayes.posteriors import CALLBACK_KEY
from lightning_bayes.predictive import Link
from lightning_bayes.strategies import BayesDDPStrategy

_LARGE_PRIOR = 10.0  # a prior precision that hurt on small networks


class VariationalCallback(EvaluatingCallback):
    """Turns training of an unmodified LightningModule into variational inference.

    Args:
        lr: Learning rate α of the paper's natural step, at the peak of the user's schedule. None, the default step: the
            user's own optimizer moves the mean (see `optim.steps.base_optimizer`; a heuristic). Schedulers act on either.
        mc_samples: K, weight samples per batch and process in training.
        eval_samples: S, weight samples in validation, test and prediction; 0 evaluates at the posterior mean.
        prior_precision: δ of the prior N(μ₀, 1/δ). None: from the optimizer's L2 ``weight_decay`` (δ = Ñ·wd/τ),
            else 0.1 with the default step and 1 with an explicit `lr`. The mean feels a prior in the default step only if
            one is asked for: by this, by ``prior_mean="initial"``, or by an L2 penalty (see `optim.steps.base_optimizer`).
        prior_mean: ``"zero"``, or ``"initial"`` for μ₀ = the weights at the start of the fit, such as pretrained ones.
        kl_weight: τ, weight of the KL term, above 0: below 1 gives a cold posterior, above 1 a warm one.
        kl_warmup_steps: Updates over which τ grows linearly to `kl_weight`; 0 for none.
        kl_warmup_init: Fraction of `kl_weight` at the start of the warm-up.
        data_augmentation_factor: ρ; augmentation makes N examples count as ρN. None: what the data module says, else 1.
        damping: γ, added to the curvature in the preconditioner.
        init_precision: Posterior precision before the first update; the default step forgets it there. None takes the first
            batch's curvature.
        betas: (β₁, β₂), weights of the old momentum and of the old curvature, as in Adam.
        num_data: N, number of training examples; None asks the trainer's data loader.
        engine: ``"fused"`` measures any layer; ``"backpack"`` is BackPACK, for the layers it knows.
        relative_noise: Upper bound of the noise in units of each tensor's size. None: no bound with an explicit `lr`;
            with the default step 0.3 for classifiers (told by `link` or by the loss; 0.1 where SGD moves the mean) and 0.02
            for all else, less for more than five layers (`optim.steps.base_optimizer.noise_of_depth`): a heuristic.
        damping_in_noise: Whether γ counts in the posterior precision too.
        loss_reduction: ``"auto"`` reads from the loss's graph whether it is a mean or a sum over examples.
        link: How outputs become predictions in evaluation. None: the module's attribute ``link``, else what
            the training loss says (``mse_loss``: ``"identity"``), else ``"softmax"``.
        bayesian: Regular expression of the parameters, by name, that have a posterior; the others are points, trained by
            the same step. None for all, in the default step without normalisation layers, whose single numbers drive
            whole channels: their noise cost a small ResNet most (a heuristic). ``"^head"`` is a last-layer posterior.
        seed: Seed of the noise.
        max_nonfinite_steps: Updates in a row that may be skipped for a gradient that is not finite.

    Numbers may be functions of the number of updates (`lightning_bayes.LinearSchedule` and its siblings).

    Raises:
        HyperparameterError: If an argument lies outside of its range.
    """

    noise_bounds: ClassVar[tuple[float, float]] = (NOISE_OF_CLASSIFIERS, NOISE_OF_OTHERS)  # κ of the default step

    def __init__(
        self,
        lr: float | Schedule | None = None,
        mc_samples: int = 1,
        eval_samples: int = 10,
        prior_precision: float | Schedule | None = None,
        prior_mean: PriorMean = "zero",
        kl_weight: float | Schedule = 1.0,
        kl_warmup_steps: int = 0,
        kl_warmup_init: float = 0.1,
        data_augmentation_factor: float | Schedule | None = None,
        damping: float | Schedule = 0.0,
        init_precision: float | None = None,
        betas: tuple[float, float] | BetaSchedule = (0.9, 0.999),
        num_data: int | None = None,
        engine: EngineName = "fused",
        relative_noise: float | Schedule | None = None,
        damping_in_noise: bool = False,
        loss_reduction: LossReduction = "auto",
        link: Link | None = None,
        bayesian: str | None = None,
        seed: int = 0,
        max_nonfinite_steps: int = 10,
    ) -> None:
        arguments = plain({k: v for k, v in locals().items() if k not in {"self", "__class__"}})
        self.optimizer_class.hyperparameters.check(arguments)
        check_names(engine, loss_reduction)
        super().__init__(eval_samples, link, seed)
        self.lr, self.num_data = arguments["lr"], arguments["num_data"]
        self.mc_samples, self.prior_precision = mc_samples, prior_precision
        self.options: dict[str, Any] = {
            "betas": arguments["betas"],
            "kl_weight": kl_weight,
            "kl_warmup_steps": kl_warmup_steps,
            "kl_warmup_init": kl_warmup_init,
            "data_augmentation_factor": data_augmentation_factor,
            "damping": damping,
            "damping_in_noise": damping_in_noise,
            "prior_mean": prior_mean,
            "init_precision": init_precision,
            "relative_noise": min(self.noise_bounds) if lr is None and relative_noise is None else relative_noise,
            "step_rule": self.optimizer_class.default_step if lr is None else "natural",
        }
        self.building: dict[str, Any] = {
            "engine": engine,
            "loss_reduction": loss_reduction,
            "mc_samples": mc_samples,
            "bayesian": bayesian,
            "seed": seed,
            "max_nonfinite_steps": max_nonfinite_steps,
        }
        self._default_noise = DefaultNoise(self.noise_bounds) if lr is None and relative_noise is None else None
        self._states_prior = prior_precision is not None or prior_mean != "zero"
        self._names: dict[nn.Parameter, str] = {}
        self._saved: dict[str, Any] = {}  # the state of this callback in a checkpoint to resume from
        self._loading: WholeOrNothing | None = None  # until a resumed run has begun
        self._agreed = False  # whether the ranks have compared their settings
        self._undo = ExitStack()

    @classmethod
    def presets(cls) -> dict[str, Preset]:
        """Published settings of this callback, by name."""
        return presets_of(cls.__name__)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> VariationalCallback:
        """Build the callback with published hyperparameters.

        In a config it is ``class_path: lightning_bayes.VOGNCallback.from_preset`` with the name among the ``init_args`` and
        overrides among the ``dict_kwargs``.

        Args:
            name: One of `presets`, such as ``"osawa2019-cifar10-resnet18"``.
            **overrides: Arguments that take the place of the preset's.

        Returns:
            The callback.
        """
        return cls(**{**find_preset(cls.__name__, name).arguments, **overrides})

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
        self._saved, self._asked_loss = {}, False
        use_whole_files(trainer)
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

        self._loading = WholeOrNothing(strategy, pl_module)
        strategy.load_model_state_dict = self._loading.load_model_state_dict  # type: ignore[method-assign]
        self._undo.callback(strategy.__dict__.pop, "load_model_state_dict", None)
        strategy.setup_optimizers = setup_optimizers  # type: ignore[method-assign]
        loop._make_closure = make_monte_carlo_closure  # type: ignore[method-assign]
        self._undo.callback(strategy.__dict__.pop, "setup_optimizers", None)
        self._undo.callback(loop.__dict__.pop, "_make_closure", None)

    def _swap(self, trainer: Trainer, pl_module: LightningModule) -> None:
        checks.check_training(trainer, pl_module)  # again: configure_model and other callbacks ran since
        strategy = trainer.strategy
        follows = self.options["step_rule"] == "user"
        old = swap.check_swappable(strategy.optimizers, pl_module, self.options["step_rule"] != "trust_region")
        schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
        cycles = swap.cycles_momentum(schedulers)
        groups = swap.converted_groups(old, self.options["betas"], cycles)
        if self.lr is not None:
            swap.override_rates(groups, schedulers, self.lr)
        later = swap.converted_defaults(old)  # for groups added later
        for group in (*groups, later):
            group["prior_on_mean"] = self._states_prior or group["l2_penalty"] > 0
        default_prior = PRIOR_PRECISION if follows else 1.0
        user_step: dict[str, Any] = {"base": swap.without_penalty(old, cycles)} if follows else {}
        new = self.optimizer_class(
            pl_module,
            groups,
            lr=groups[0]["lr"],
            prior_precision=default_prior if self.prior_precision is None else self.prior_precision,
            **{key: later[key] for key in ("radius", "momentum", "weight_decay")},
            **with_augmentation_factor(self.options, trainer),
            **self.building,
            **user_step,
        )
        new.defaults |= {key: later[key] for key in ("l2_penalty", "prior_on_mean")}
        new.samples_in_closure = True
        swap.rebind_schedulers(schedulers, old, new)
        strategy.optimizers = [new]
        self.optimizer = new
        self._kept, self._agreed = None, False
        self._names = {param: name for name, param in pl_module.named_parameters()}
        resume.check_order(self._saved.get("param_names"), self.state_dict()["param_names"])

    def _closure(self, trainer: Trainer, base: Any) -> Any:
        optimizer = trainer.strategy.optimizers[0]
        if not isinstance(optimizer, MeanFieldOptimizer):
            return base
        self._fix_num_data(trainer, optimizer)
        self._keep_loaded()  # again: Lightning's tuner trains without callbacks
        if not self._agreed:
            ranks.require_agreement(trainer, optimizer, self.mc_samples)
            self._agreed = True
        closure = MonteCarloClosure(base, trainer, optimizer, ranks.noise_samples(trainer, self.mc_samples))
        is_first = trainer.fit_loop.epoch_loop.batch_idx == 0 and not optimizer.num_updates
        if is_first and self.num_data is None and trainer.world_size == 1:
            closure.watch = lambda captured: warn_of_other_examples(trainer, set().union(*captured.sizes.values()))
        return closure

    def _fix_num_data(self, trainer: Trainer, optimizer: MeanFieldOptimizer) -> None:
        """Set N, and the prior that an L2 penalty stands for, once the data loader exists."""
        # The groups are asked and not the defaults: Lightning's tuner restores groups from before the first step.
        unset = [group for group in optimizer.param_groups if group["num_data"] is None]
        if not unset:
            return
        num_data = self.num_data or infer_num_data(trainer)
        for group in (optimizer.defaults, *unset):  # groups added later inherit the defaults
            group["num_data"] = num_data
            self._take_prior_from_penalty(group)
        for group in unset:
            self.optimizer_class.hyperparameters.check(group)
        self._warn_of_strong_prior(unset)

    def _take_prior_from_penalty(self, group: dict[str, Any]) -> None:
        if self.prior_precision is None and group.get("l2_penalty"):
            now = {name: value_at(value, group["step"]) for name, value in group.items()}  # defaults may hold functions
            group["prior_precision"] = group["l2_penalty"] * effective(now).num_data / now["kl_weight"]  # δ̃ = wd

    def _warn_of_strong_prior(self, groups: list[dict[str, Any]]) -> None:
        strongest = max(groups, key=lambda group: float(group["prior_precision"]))
        if self.prior_precision is None and strongest["prior_precision"] > _LARGE_PRIOR:
            rank_zero_warn(
                f"weight_decay={strongest['l2_penalty']:g} over {effective(strongest).num_data:g} examples is the "
                f"prior precision {strongest['prior_precision']:.4g}, which is strong. Pass prior_precision=1.0 to choose "
                "another prior."
            )

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Names of the optimizer's parameters in its order, which make its state a posterior; link; learning rate."""
        if self.optimizer is None:
            return {}
        names = [[self._names[p] for p in group["params"]] for group in self.optimizer.param_groups]
        return {"format": 1, "param_names": names, "link": self.loss_link, "lr": None if callable(self.lr) else self.lr}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the mean even if the save comes from inside a pass, such as from a signal handler.

        Args:
            trainer: The trainer.
            pl_module: The module.
            checkpoint: What will be written; nothing is, and a `NonFiniteError` raised, where an update has overflowed.
        """
        if self.optimizer is not None:
            self.optimizer.require_finite()
        mean = self.optimizer.sampled_mean() if self.optimizer is not None else {}
        for name, param in pl_module.named_parameters(remove_duplicate=False):
            if param in mean and name in checkpoint["state_dict"]:
                checkpoint["state_dict"][name] = mean[param]
        take_plain_numbers(checkpoint)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Check that a run can be resumed, or take the posterior for evaluation.

        Args:
            trainer: The trainer.
            pl_module: The module.
            checkpoint: What was read.
        """
        if trainer.state.fn == "fit":
            self._saved = resume.saved_state(checkpoint, type(self).__name__)
            return
        self.take_posterior(checkpoint)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what a resumed run takes from the checkpoint rather than from this callback.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        self._keep_loaded()
        if self.optimizer is None or not self.optimizer.num_updates:
            return
        kept, wanted = dict(self.optimizer.param_groups[0]), with_augmentation_factor(self.options, trainer)
        if swap.cycles_momentum(config.scheduler for config in trainer.strategy.lr_scheduler_configs):
            del wanted["betas"]  # they change all the time
        self.optimizer.defaults["num_data"] = kept["num_data"]
        wanted["noisy"], wanted["noise_seed"] = self.optimizer_class.noisy, self.seed
        wanted["num_data"] = self.num_data or infer_num_data(trainer)
        if self.prior_precision is not None:
            wanted["prior_precision"] = self.prior_precision
        if self._default_noise is not None:
            del wanted["relative_noise"]  # the loss will tell
        if "lr" in self._saved and not callable(self.lr):
            kept["lr"], wanted["lr"] = self._saved["lr"], self.lr  # the group's follows the user's schedule
        changed = resume.changed_arguments(kept, wanted)
        if changed:
            rank_zero_warn(f"The resumed run keeps the checkpoint's {changed}.")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Bound the noise of the updates to come by what the loss has told and by the layers that are trained.

        The passes of one update have one bound, however its examples are spread over batches.

        Args:
            trainer: The trainer.
            pl_module: The module.
            outputs: What the step returned.
            batch: The batch.
            batch_idx: Its number.
        """
        if self._default_noise is not None and self._asked_loss and self.optimizer is not None and trainer.global_step:
            self._default_noise.apply(self.optimizer, self._link_of(pl_module))

    # -- the record and the end ---------------------------------------------------------------------------------------

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the share of weights whose noise the relative floor sets, and the number of skipped updates.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        if self.optimizer is None or trainer.barebones:
            return
        if isinstance(trainer.strategy, BayesDDPStrategy) and trainer.strategy.reduced_bytes is not None:
            pl_module.log("distributed/reduced_mib", trainer.strategy.reduced_bytes / 2**20, sync_dist=True)
        share, bound = float(self.optimizer.floored_share()), self.optimizer.param_groups[0]["relative_noise"]
        if self.optimizer.noisy:
            pl_module.log("posterior/floored_share", share, sync_dist=True)
        pl_module.log("posterior/skipped_updates", float(self.optimizer.skipped_steps), sync_dist=True)
        if share > 0.5 and trainer.current_epoch == 0:
            rank_zero_info(
                f"{share:.0%} of the weights have their noise set by relative_noise={bound:.2g} and not by the data: at "
                "this many examples their curvature alone would allow noise larger than that share of the weights' own "
                "size. The noise is then a heuristic scale, not the posterior's width."
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse to end with numbers that are not finite, which the next pass would have shown.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        if self.optimizer is not None:
            self.optimizer.require_finite()

    def _keep_loaded(self) -> None:
        if self._loading is not None:
            self._loading.keep()

    def _restore(self) -> None:
        super()._restore()
        self._undo.close()
        if self._loading is not None:
            self._loading.undo()
            self._loading = None
