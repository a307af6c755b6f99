"""The Laplace approximation of what the user's optimizer has trained."""

from __future__ import annotations

from typing import Any, Final, final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bayes.callbacks.evaluation import require_single_evaluation
from lightning_bayes.callbacks.last_epoch import is_last_epoch
from lightning_bayes.callbacks.posthoc import PosthocCallback
from lightning_bayes.callbacks.training_data import OnDevice, training_loader
from lightning_bayes.callbacks.validation_set import ValidationSet
from lightning_bayes.curvature import Likelihood
from lightning_bayes.curvature.output_roots import CurvatureName
from lightning_bayes.curvature.parameters import require_full_precision
from lightning_bayes.errors import HyperparameterError, UnsupportedTrainingError
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.posthoc import Laplace, LikelihoodName, PriorPrecision, PriorStructure, StructureName, laplace
from lightning_bayes.posthoc.full import require_full_size
from lightning_bayes.posthoc.laplace import chosen_names
from lightning_bayes.posthoc.settings import check_settings, find_likelihood, link_of
from lightning_bayes.predictive import Linearized, Link, evaluation_mode

_NAMES: Final[dict[Link, LikelihoodName]] = {
    "softmax": "classification",
    "sigmoid": "binary",
    "identity": "regression",
}
_REASONS: Final = {"marglik": " by marginal likelihood", "validation": " by the NLL of the validation set"}


@final
class LaplaceCallback(PosthocCallback):
    """Approximates the posterior around the weights of an ordinary fit, or of a checkpoint (see `lightning_bayes.laplace`).

    Training is the module's own. At the end of a fit the curvature is measured in one pass over the training data, and the
    checkpoint keeps the posterior, so that `load_posterior` finds it. A checkpoint without one, such as one that Adam has
    trained without this callback, gets it before its test, validation or prediction: ``lightning-bayes laplace --config …
    --ckpt_path …``. Validation inside the fit is the module's own.

    The module is called on the inputs of batches ``(inputs, targets)``.

    Args:
        structure: ``"diagonal"``, ``"kronecker"`` or ``"full"``.
        subset: ``"last_layer"``, ``"all"``, or a regular expression that is searched in parameter names.
        curvature: ``"ggn"``, ``"fisher"`` or ``"empirical_fisher"``.
        prior_precision: δ; ``"marglik"``, the highest marginal likelihood; or ``"validation"``, the lowest NLL of the
            validation set. None: ``"validation"`` for classes where there is a validation set, because the marginal
            likelihood of a network that has learned its training data gives far too wide a posterior; else ``"marglik"``.
        prior_structure: ``"scalar"`` or ``"layerwise"``.
        linearized: ``"closed_form"``, the linearised predictive by the probit approximation; True, by samples, which is
            cheaper for all layers of a large network; False for sampled networks.
        eval_samples: S, samples where the predictive has some, and points of a regression in closed form; 0 for the network.
        mc_samples: Labels drawn per example for ``"fisher"``.
        online_every: Epochs between maximisations of the marginal likelihood during the fit, whose prior precision becomes
            the optimizer's weight decay δ/N (Immer et al. 2021, https://arxiv.org/abs/2104.04975); None for none.
        likelihood: The likelihood of the targets. None: the module's attribute ``likelihood``, else that of its attribute
            ``link``, else that of the training loss, else ``"classification"``.
        seed: The seed of drawn labels and samples.
        save_to: Where a checkpoint that got its posterior before an evaluation is written; None for nowhere.

    Attributes:
        result: The last `Laplace`; None before.

    Raises:
        HyperparameterError: If an argument lies outside of its range.
    """

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
        likelihood: Likelihood | LikelihoodName | None = None,
        seed: int = 0,
        save_to: str | None = None,
    ) -> None:
        super().__init__(
            None if likelihood is None else link_of(find_likelihood(likelihood)[0]), eval_samples, linearized, seed
        )
        self.save_to = save_to
        check_settings(structure, prior_precision or "marglik", prior_structure)
        if online_every is not None and (online_every < 1 or subset != "all" or prior_structure != "scalar"):
            raise HyperparameterError(
                f"online_every={online_every!r} sets the weight decay of all weights: it must be at least 1, with "
                f"subset='all' (now {subset!r}) and prior_structure='scalar' (now {prior_structure!r})."
            )
        self.structure, self.subset, self.curvature = structure, subset, curvature
        self.prior_precision, self.prior_structure = prior_precision, prior_structure
        self.mc_samples, self.online_every, self.likelihood = mc_samples, online_every, likelihood
        self.result: Laplace | None = None
        self._validation = ValidationSet(type(self).__name__, "prior precision")
        self._fitted_on: Any = None

    # -- the fit ------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loaders, and require what the end of the fit needs."""
        require_single_evaluation(trainer)
        _require_one_process(trainer)
        require_full_precision(pl_module.parameters())
        self._fitted_on = trainer.train_dataloader
        if self.prior_precision == "validation":
            self._validation.require(trainer)
        if self.online_every is not None:
            _require_weight_decay(trainer)
        if self.structure == "full" and self.subset != "last_layer":
            params = dict(pl_module.named_parameters())
            require_full_size({name: params[name] for name in chosen_names(pl_module, self.subset, ())})

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loaders."""
        self._validation.keep(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Approximate the posterior after the last epoch, before the checkpoint is written."""
        is_last = is_last_epoch(trainer)
        is_online = self.online_every is not None and (trainer.current_epoch + 1) % self.online_every == 0
        if not is_last and not is_online:
            return
        found = self._approximated(trainer, pl_module, self._fitted_on, self._deciding(pl_module, None))
        if is_last:
            self.keep(found.posterior)
        else:
            delta = next(iter(found.prior_precision.values()))
            for group in trainer.optimizers[0].param_groups:
                group["weight_decay"] = delta / found.posterior.num_data
        pl_module.log("laplace/log_marginal_likelihood", found.log_marginal_likelihood)
        for layer, delta in _by_layer(found).items():
            pl_module.log(f"laplace/prior_precision{layer}", delta)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def missing_posterior(self, trainer: Trainer, pl_module: LightningModule) -> AbstractPosterior:
        """Approximate the posterior of weights that were loaded without one.

        Returns:
            The posterior.
        """
        _require_one_process(trainer)
        loader = training_loader(trainer, pl_module, self._fitted_on, type(self).__name__)
        return self._approximated(trainer, pl_module, loader, self._deciding(pl_module, trainer)).posterior

    def _deciding(self, module: LightningModule, trainer: Trainer | None) -> Any:
        """The loader of the validation set that decides δ, of a fit or of another trainer; None if none does."""
        if self.prior_precision == "validation":
            return self._validation.loader(trainer)
        decides = self.prior_precision is None and self.online_every is None and self._has_classes(module)
        return self._validation.find(trainer) if decides else None

    def _has_classes(self, module: LightningModule) -> bool:
        return link_of(find_likelihood(self._likelihood_of(module))[0]) != "identity"

    def _likelihood_of(self, module: LightningModule) -> Likelihood | LikelihoodName:
        own = self.likelihood or getattr(module, "likelihood", None)
        return own or _NAMES[self.evaluation.link_of(module) or "softmax"]

    def _approximated(self, trainer: Trainer, module: LightningModule, loader: Any, validation: Any) -> Laplace:
        by_default: PriorPrecision = "marglik" if validation is None else "validation"
        prior = by_default if self.prior_precision is None else self.prior_precision
        devices = [module.device] if module.device.type == "cuda" else []
        # Loaders draw random numbers, and tests run in inference mode, whose tensors have no gradients.
        with torch.inference_mode(False), evaluation_mode(module), torch.random.fork_rng(devices):
            self.result = laplace(
                module,
                OnDevice(trainer, loader),
                self._likelihood_of(module),
                self.structure,
                self.subset,
                self.curvature,
                prior,
                prior_structure=self.prior_structure,
                validation=None if validation is None else OnDevice(trainer, validation),
                mc_samples=self.mc_samples,
                seed=self.seed,
                require_trained=trainer.state.fn != "fit",  # a finished fit is not to be lost
            )
        deltas = ", ".join(f"{delta:.3g}" for delta in _by_layer(self.result).values())
        rank_zero_info(
            f"LaplaceCallback: the log marginal likelihood is {self.result.log_marginal_likelihood:.1f} nats, the prior "
            f"precision{_REASONS.get(str(prior), '')} {deltas}."
        )
        return self.result


def _by_layer(found: Laplace) -> dict[str, float]:
    """δ without a name if there is one, else by layer."""
    values = found.prior_precision
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
        decoupled = isinstance(optimizer, torch.optim.AdamW) or optimizer.defaults.get("decoupled_weight_decay")
        if decoupled or any("weight_decay" not in group for group in optimizer.param_groups):
            raise UnsupportedTrainingError(
                f"online_every sets the L2 penalty δ/N of the loss, which {type(optimizer).__name__} does not have: its "
                "weight decay is decoupled from the gradient, or absent. Use Adam or SGD."
            )
