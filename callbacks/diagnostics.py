"""Logs diagnostics of the posterior during training, and warns about layers with a degenerate posterior."""

from __future__ import annotations

from typing import Any, final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_bayes.callbacks.arguments import checked
from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.neighbours import callbacks_of
from lightning_bayes.errors import HyperparameterError, UnsupportedTrainingError
from lightning_bayes.optim import VariationalOptimizer
from lightning_bayes.optim.effective import effective
from lightning_bayes.posteriors import AbstractPosterior, diagnostics

_LARGEST_NOISE_TO_WEIGHT = 1.0
_SMALLEST_DATA_SHARE = 0.01


@final
class PosteriorDiagnostics(Callback):
    """Logs diagnostics of the posterior that a `VariationalCallback` of the same trainer trains.

    The keys are ``posterior/noise_to_weight``, ``posterior/kl`` (nats), ``posterior/kl_per_example``,
    ``posterior/precision_q05``, ``_q50`` and ``_q95``, ``posterior/data_share`` and ``posterior/step_to_noise`` (of the
    epoch's last update). They cover all weights; keys with a layer's name after a slash cover one layer. See
    `posteriors.diagnostics` for the equations. Two warnings name layers, each layer once: the noise is larger than the
    weights, or the data contribute almost nothing to the precision.

    Args:
        every_n_epochs: Number of epochs per log; 1 logs after every epoch.
        per_layer: Whether to log each layer. Warnings always name layers.

    Raises:
        HyperparameterError: If `every_n_epochs` is not a whole number of at least 1.
    """

    @checked
    def __init__(self, every_n_epochs: int = 1, per_layer: bool = True) -> None:
        if not isinstance(every_n_epochs, int) or every_n_epochs < 1:
            raise HyperparameterError(f"every_n_epochs={every_n_epochs!r} must be a whole number of at least 1.")
        self.every_n_epochs, self.per_layer = every_n_epochs, per_layer
        self._source: VariationalCallback | None = None
        self._old_means: dict[str, Tensor] = {}  # before the epoch's last update
        self._warned: set[tuple[str, str]] = set()  # problem and layer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the callback that trains the posterior.

        Raises:
            UnsupportedTrainingError: If there is none, or its optimizer has no posterior.
        """
        self._old_means, self._warned = {}, set()
        if stage != "fit":
            return
        sources = callbacks_of(trainer, VariationalCallback)
        if not sources:
            raise UnsupportedTrainingError(
                "PosteriorDiagnostics found no callback that trains a posterior. Add one, such as VOGNCallback(), to the "
                "trainer's callbacks."
            )
        if not sources[0].optimizer_class.noisy:
            raise UnsupportedTrainingError(
                f"{sources[0].name} trains a point estimate, so PosteriorDiagnostics has no posterior to diagnose. Remove "
                "it, or train with VOGNCallback()."
            )
        self._source = sources[0]

    def _is_due(self, trainer: Trainer) -> bool:
        return not trainer.barebones and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Copy the means before the last update of the epoch."""
        if trainer.is_last_batch and self._is_due(trainer):
            self._old_means = {name: param.detach().clone() for name, param in pl_module.named_parameters()}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the diagnostics, and warn about layers."""
        optimizer = self._source.optimizer if self._source is not None else None
        if optimizer is None or not self._is_due(trainer) or not optimizer.num_updates:
            return
        posterior = optimizer.posterior()
        shares = shares_of_data(optimizer, posterior)
        old = self._old_means
        steps = {name: mean - old[name] for name, mean in posterior.mean.items() if name in old}
        self._old_means = {}
        self._log(pl_module, diagnose(posterior, shares, steps))
        by_layer = {
            layer: diagnose(diagnostics.marginals(posterior, names), shares, steps)
            for layer, names in diagnostics.layers_of(posterior.mean).items()
        }
        if self.per_layer:
            for layer, numbers in by_layer.items():
                self._log(pl_module, numbers, f"/{layer}")
        self._warn(by_layer)

    @staticmethod
    def _log(pl_module: LightningModule, numbers: dict[str, float], suffix: str = "") -> None:
        pl_module.log_dict({f"posterior/{name}{suffix}": value for name, value in numbers.items()}, sync_dist=True)

    def _warn(self, by_layer: dict[str, dict[str, float]]) -> None:
        noisy = [layer for layer, v in by_layer.items() if v["noise_to_weight"] > _LARGEST_NOISE_TO_WEIGHT]
        collapsed = [layer for layer, v in by_layer.items() if v["data_share"] < _SMALLEST_DATA_SHARE]
        if noisy := self._not_yet_warned("noise", noisy):
            rank_zero_warn(
                f"The posterior's noise is larger than the weights in {', '.join(noisy)}, so predictions are mostly noise. "
                "Raise prior_precision, lower kl_weight, or bound the noise's standard deviation, in units of the weights, "
                "with max_noise."
            )
        if collapsed := self._not_yet_warned("collapse", collapsed):
            rank_zero_warn(
                f"The curvature has collapsed in {', '.join(collapsed)}: the data contribute less than "
                f"{_SMALLEST_DATA_SHARE:.0%} of the precision, so the prior (or damping_in_noise) sets the "
                "posterior's width. The layers may be dead, or fit so well that gradients vanish; their Hessian may be "
                "negative; or there are too few data for this prior_precision."
            )

    def _not_yet_warned(self, problem: str, layers: list[str]) -> list[str]:
        new = [layer for layer in layers if (problem, layer) not in self._warned]
        self._warned.update((problem, layer) for layer in new)
        return new


def diagnose(posterior: AbstractPosterior, shares: dict[str, Tensor], steps: dict[str, Tensor]) -> dict[str, float]:
    """Compute all diagnostics."""
    kl, levels = float(posterior.kl()), diagnostics.precision_quantiles(posterior)
    numbers = {
        "noise_to_weight": diagnostics.noise_to_weight(posterior),
        "kl": kl,
        "kl_per_example": kl / posterior.num_data,
        **dict(zip(("precision_q05", "precision_q50", "precision_q95"), levels, strict=True)),
        "data_share": diagnostics.average({name: shares[name] for name in posterior.mean}),
    }
    if steps:
        numbers["step_to_noise"] = diagnostics.step_to_noise(steps, posterior)
    return numbers


def shares_of_data(optimizer: VariationalOptimizer, posterior: AbstractPosterior) -> dict[str, Tensor]:
    """Fraction of each weight's precision that comes from the data, not from prior and damping, by parameter name."""
    groups = {param: group for group in optimizer.param_groups for param in group["params"]}
    without_data = dict(posterior.prior_precision)
    for name, param in optimizer.model.named_parameters():
        hyperparameters = effective(groups[param]) if name in without_data else None
        if hyperparameters is not None and hyperparameters.relative_noise is None:
            damping = hyperparameters.noise_damping * hyperparameters.scale
            without_data[name] = without_data[name] + damping
    return diagnostics.data_shares(posterior, without_data)
