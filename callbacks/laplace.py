"""The Laplace approximation around the weights that the user's optimizer has trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bayes.callbacks.posthoc.base import PosthocCallback
from lightning_bayes.callbacks.posthoc.laplace_batches import known_likelihood, stated_likelihood
from lightning_bayes.callbacks.trainer.arguments import checked
from lightning_bayes.callbacks.trainer.batch_reader import BatchReader
from lightning_bayes.callbacks.trainer.last_epoch import fit_kept, is_last_epoch
from lightning_bayes.callbacks.trainer.loaders import OnDevice, ValidationSet, random_state_kept, training_loader
from lightning_bayes.callbacks.trainer.private_lightning import training_batches
from lightning_bayes.curvature.output_roots import CurvatureName
from lightning_bayes.curvature.parameters import require_full_precision
from lightning_bayes.errors import BayesError, HyperparameterError, UnsupportedTrainingError
from lightning_bayes.likelihood import Gaussian, Likelihood, LikelihoodName, OutputLikelihood, PredictedGaussian
from lightning_bayes.optim.base_optimizer import decay_kind
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.posthoc import Laplace, PriorPrecision, PriorStructure, StructureName, laplace
from lightning_bayes.posthoc.batches import with_kinds
from lightning_bayes.posthoc.full import require_full_size
from lightning_bayes.posthoc.laplace import check_settings, chosen_names, kinds_of
from lightning_bayes.predictive import Linearized, evaluation_mode

_REASONS: Final = {"marglik": " by marginal likelihood", "validation": " by the NLL of the validation set"}


@final
class LaplaceCallback(PosthocCallback):
    """Approximates the posterior around the weights of an ordinary fit, or of a checkpoint (see `lightning_bayes.laplace`).

    Training, and validation during the fit, are unchanged. At the end of a fit, the callback measures the curvature in one
    pass over the training data and stores the posterior in the checkpoint, where `load_posterior` finds it. For a checkpoint
    without a posterior, such as one trained with Adam without this callback, it computes the posterior before the test,
    validation or prediction: ``lightning-bayes laplace --config … --ckpt_path …``.

    Batches are read as the training step reads them: any inputs, nested outputs, ignored, missing and weighted targets.
    Where a batch alone does not tell its targets, because the step selects or changes them, the training step itself is run:
    it logs nothing, and the module is as before afterwards.

    Args:
        structure: ``"diagonal"``, ``"kronecker"`` or ``"full"``.
        subset: ``"last_layer"``, ``"all"``, or a regular expression to search in parameter names.
        curvature: ``"ggn"``, ``"fisher"`` or ``"empirical_fisher"``.
        prior_precision: δ; ``"marglik"`` maximises the marginal likelihood; ``"validation"`` minimises the NLL of the
            validation set. None: ``"validation"`` for classification with a validation set and without `online_every`,
            because the marginal likelihood of a network that has fitted its training data makes the posterior far too wide;
            else ``"marglik"``.
        prior_structure: ``"scalar"`` or ``"layerwise"``.
        linearized: The predictive. ``"closed_form"``: linearised, with the probit approximation. True: linearised, with
            samples, which is cheaper for all layers of a large network. False: sampled networks.
        eval_samples: S, number of samples; the closed form represents the Gaussian of the outputs by S values. 0 evaluates
            the network.
        mc_samples: Labels drawn per example for ``"fisher"``.
        online_every: Epochs between maximisations of the marginal likelihood during the fit. Each sets the optimizer's
            weight decay to δ/N (Immer et al. 2021, https://arxiv.org/abs/2104.04975). None disables them.
        likelihood: Likelihood of the targets, which completes that of the training loss. None: the module's attribute
            ``lightning_bayes_likelihood`` or ``lightning_bayes_link``, else the loss's; where none tells, an error asks.
        seed: Seed of drawn labels and samples.
        save_to: Where to write a checkpoint whose posterior was computed before an evaluation; None does not write it.

    Attributes:
        result: The last `Laplace`; None before the first.

    Raises:
        HyperparameterError: If an argument is out of range.
    """

    settings = ("structure", "subset", "curvature", "prior_structure")

    @checked
    def __init__(
        self,
        structure: StructureName = "kronecker",
        subset: str = "last_layer",
        curvature: CurvatureName = "ggn",
        prior_precision: PriorPrecision | None = None,
        prior_structure: PriorStructure = "scalar",
        linearized: Linearized = "closed_form",
        eval_samples: int = 32,
        mc_samples: int = 1,
        online_every: int | None = None,
        likelihood: OutputLikelihood | LikelihoodName | None = None,
        seed: int = 0,
        save_to: str | None = None,
    ) -> None:
        super().__init__(None if likelihood is None else kinds_of(likelihood)[0], eval_samples, linearized, seed)
        check_settings(structure, prior_precision or "marglik", prior_structure)
        if online_every is not None and (online_every < 1 or subset != "all" or prior_structure != "scalar"):
            raise HyperparameterError(
                f"online_every={online_every!r} sets the weight decay of all weights: it must be at least 1, with "
                f"subset='all' (now {subset!r}) and prior_structure='scalar' (now {prior_structure!r})."
            )
        self.structure, self.subset, self.curvature = structure, subset, curvature
        self.prior_precision, self.prior_structure, self.save_to = prior_precision, prior_structure, save_to
        self.mc_samples, self.online_every, self.likelihood = mc_samples, online_every, likelihood
        self.result: Laplace | None = None
        self._validation = ValidationSet(type(self).__name__, "prior precision")
        self._fitted_on: Any = None
        self._without_noise: Likelihood | None = None  # the likelihood before its noise was chosen

    # -- the fit ------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check what the end of the fit needs."""
        _require_one_process(trainer)
        require_full_precision(pl_module.parameters())
        self._has_tried, self._without_noise = False, None
        if self.prior_precision == "validation":
            self._validation.require(trainer)
        if self.online_every is not None:
            _require_weight_decay(trainer)
        if self.subset != "last_layer":  # which only a batch tells
            chosen = {name: pl_module.get_parameter(name) for name in chosen_names(pl_module, self.subset, ())}
            if self.structure == "full":
                require_full_size(chosen)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the training loaders, which may be those of this epoch alone."""
        self._fitted_on = training_batches(trainer)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loaders."""
        self._validation.keep(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Try the first batch of a fit: what the end of the fit needs of loss, targets and batches is asked for now."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if not self._has_tried:
            self._has_tried, first = True, self._first_batch
            with torch.inference_mode(False), evaluation_mode(pl_module), random_state_kept(pl_module):
                try:
                    likelihood = self._likelihood_of(pl_module, [first])
                    options: dict[str, Any] = {"prior_precision": 1.0, "require_trained": False}
                    options["read"] = self._reader(pl_module, likelihood)
                    laplace(pl_module, [first], likelihood, "diagonal", self.subset, **options)
                except (BayesError, RuntimeError, TypeError, ValueError) as error:
                    raise UnsupportedTrainingError(
                        f"LaplaceCallback cannot measure the first batch, so it would fail at the end of the fit: {error} "
                        "Or train without LaplaceCallback."
                    ) from error

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Approximate the posterior after the last epoch, before the checkpoint is written."""
        is_last = is_last_epoch(trainer)
        is_online = self.online_every is not None and (trainer.current_epoch + 1) % self.online_every == 0
        if not is_last and not is_online:
            return
        with fit_kept(type(self).__name__, "a posterior"):
            self._finish_epoch(trainer, pl_module, is_last)

    def _finish_epoch(self, trainer: Trainer, pl_module: LightningModule, is_last: bool) -> None:
        result = self._approximate(trainer, pl_module)
        if is_last:
            self.keep(result.posterior)
        else:
            delta = next(iter(result.prior_precision.values()))
            for group in trainer.optimizers[0].param_groups:
                group["weight_decay"] = delta / result.posterior.num_data
        pl_module.log("laplace/log_marginal_likelihood", result.log_marginal_likelihood)
        for layer, delta in _by_layer(result).items():
            pl_module.log(f"laplace/prior_precision{layer}", delta)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def missing_posterior(self, trainer: Trainer, pl_module: LightningModule) -> AbstractPosterior:
        """Approximate the posterior of weights that were loaded without one."""
        _require_one_process(trainer)
        return self._approximate(trainer, pl_module).posterior

    def _validation_loader(self, trainer: Trainer, kinds: Sequence[OutputLikelihood]) -> Any:
        """The validation loader that chooses δ; None if δ is chosen otherwise."""
        if self.prior_precision == "validation":
            return self._validation.loader(trainer)
        if self.prior_precision is not None or self.online_every is not None:
            return None
        has_noise = any(isinstance(kind, (Gaussian, PredictedGaussian)) for kind in kinds)
        return None if has_noise else self._validation.find(trainer)

    def _likelihood_of(self, module: LightningModule, batches: Iterable[Any]) -> Likelihood:
        recorded = self.loss_likelihood if self._without_noise is None else self._without_noise
        return known_likelihood(module, recorded, self.likelihood, batches)

    def _reader(self, module: LightningModule, likelihood: Likelihood) -> BatchReader:
        return BatchReader(module, likelihood, is_stated=stated_likelihood(module, self.likelihood) is not None)

    def _approximate(self, trainer: Trainer, module: LightningModule) -> Laplace:
        loader = training_loader(trainer, module, self._fitted_on, type(self).__name__)
        batches = OnDevice(trainer, loader, RunningStage.TRAINING)
        # Tests run in inference mode, whose tensors have no gradients.
        with torch.inference_mode(False), evaluation_mode(module), random_state_kept(module):
            likelihood = self._likelihood_of(module, batches)
            validation = self._validation_loader(trainer, kinds_of(likelihood))
            prior = self.prior_precision or ("marglik" if validation is None else "validation")
            self.result = laplace(
                module,
                batches,
                likelihood,
                self.structure,
                self.subset,
                self.curvature,
                prior,
                prior_structure=self.prior_structure,
                validation=None if validation is None else OnDevice(trainer, validation, RunningStage.VALIDATING),
                mc_samples=self.mc_samples,
                seed=self.seed,
                require_trained=trainer.state.fn != "fit",  # do not lose a finished fit to an error
                read=self._reader(module, likelihood),
            )
        # Predict with the noise of the result, where the training loss states none.
        self.loss_likelihood, self._without_noise = with_kinds(likelihood, self.result.kinds), likelihood
        deltas = ", ".join(f"{delta:.3g}" for delta in _by_layer(self.result).values())
        # At the edge of a search the evidence is that of a prior which fits nothing.
        is_known = not self.result.at_edge
        evidence = (
            f"the log marginal likelihood is {self.result.log_marginal_likelihood:.1f} nats, " if is_known else ""
        )
        rank_zero_info(f"LaplaceCallback: {evidence}the prior precision{_REASONS.get(str(prior), '')} {deltas}.")
        return self.result


def _by_layer(result: Laplace) -> dict[str, float]:
    """δ by the layer's name after a slash; a single δ has an empty name."""
    values = result.prior_precision
    if len(set(values.values())) == 1:
        return {"": next(iter(values.values()))}
    return {f"/{name.rpartition('.')[0]}": value for name, value in values.items()}


def _require_one_process(trainer: Trainer) -> None:
    if trainer.world_size > 1:
        raise UnsupportedTrainingError(
            f"LaplaceCallback measures the curvature in one process, but this trainer has {trainer.world_size}. Train "
            "without it, then run lightning-bayes laplace --trainer.devices=1 on the checkpoint."
        )


def _require_weight_decay(trainer: Trainer) -> None:
    for optimizer in trainer.optimizers:
        groups = optimizer.param_groups
        if not all("weight_decay" in g and decay_kind(optimizer, g, states_precision=False) == "prior" for g in groups):
            raise UnsupportedTrainingError(
                f"online_every sets the L2 penalty δ/N of the loss, which {type(optimizer).__name__} does not have: its "
                "weight decay is decoupled from the gradient, unknown or absent. Use Adam or SGD."
            )
