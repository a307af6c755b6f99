"""Logs the health of a posterior during training and warns of layers where it is bad."""

from __future__ import annotations

from typing import Any, final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.errors import HyperparameterError, UnsupportedTrainingError
from lightning_bayes.optim import MeanFieldOptimizer
from lightning_bayes.optim.effective import effective
from lightning_bayes.posteriors import AbstractPosterior, diagnostics

_DROWNED = 1.0  # noise to weight
_COLLAPSED = 0.01  # data share


@final
class PosteriorDiagnostics(Callback):
    """Logs diagnostics of the posterior that a `VariationalCallback` beside it trains.

    For all weights, and after a slash for each layer: ``posterior/noise_to_weight``, ``posterior/kl`` (nats),
    ``posterior/kl_per_example``, ``posterior/precision_q05``, ``_q50`` and ``_q95``, ``posterior/data_share`` and
    ``posterior/step_to_noise`` (of the last update of the epoch); see `posteriors.diagnostics` for the equations. Two
    warnings name layers, each layer once: noise larger than the weights, and precision to which the data contribute
    nothing.

    Args:
        every_n_epochs: Epochs between two logs; 1 includes the first epoch.
        per_layer: Whether to log each layer. Warnings always name layers.

    Raises:
        HyperparameterError: If `every_n_epochs` is below 1 or no whole number.
    """

    def __init__(self, every_n_epochs: int = 1, per_layer: bool = True) -> None:
        if not isinstance(every_n_epochs, int) or every_n_epochs < 1:
            raise HyperparameterError(f"every_n_epochs={every_n_epochs!r} must be a whole number of at least 1.")
        self.every_n_epochs, self.per_layer = every_n_epochs, per_layer
        self._source: VariationalCallback | None = None
        self._before: dict[str, Tensor] = {}  # the means before the epoch's last update
        self._named: set[tuple[str, str]] = set()  # warnings given, with their layer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the callback that trains the posterior.

        Raises:
            UnsupportedTrainingError: If there is none, or its optimizer has no posterior.
        """
        self._before, self._named = {}, set()
        if stage != "fit":
            return
        found = [c for c in trainer.callbacks if isinstance(c, VariationalCallback)]  # type: ignore[attr-defined]
        if not found:
            raise UnsupportedTrainingError(
                "PosteriorDiagnostics found no callback that trains a posterior. Add one, such as VOGNCallback(), to the "
                "trainer's callbacks."
            )
        if not found[0].optimizer_class.noisy:
            raise UnsupportedTrainingError(
                f"{type(found[0]).__name__} trains a point, so there is no posterior for PosteriorDiagnostics. Take it out, "
                "or train with VOGNCallback()."
            )
        self._source = found[0]

    def _is_due(self, trainer: Trainer) -> bool:
        return not trainer.barebones and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Copy the means before the last update of the epoch."""
        if trainer.is_last_batch and self._is_due(trainer):
            self._before = {name: param.detach().clone() for name, param in pl_module.named_parameters()}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log, and warn."""
        optimizer = self._source.optimizer if self._source is not None else None
        if optimizer is None or not self._is_due(trainer) or not optimizer.num_updates:
            return
        posterior = optimizer.posterior()
        shares = shares_of_data(optimizer, posterior)
        steps = {name: mean - self._before[name] for name, mean in posterior.mean.items() if name in self._before}
        self._before = {}
        self._log(pl_module, diagnose(posterior, shares, steps))
        numbers = {
            layer: diagnose(diagnostics.marginals(posterior, names), shares, steps)
            for layer, names in diagnostics.layers_of(posterior.mean).items()
        }
        for layer, found in numbers.items() if self.per_layer else ():
            self._log(pl_module, found, f"/{layer}")
        self._warn(numbers)

    @staticmethod
    def _log(pl_module: LightningModule, numbers: dict[str, float], suffix: str = "") -> None:
        pl_module.log_dict({f"posterior/{name}{suffix}": value for name, value in numbers.items()}, sync_dist=True)

    def _warn(self, numbers: dict[str, dict[str, float]]) -> None:
        drowned = self._not_yet_named("drowned", [k for k, v in numbers.items() if v["noise_to_weight"] > _DROWNED])
        collapsed = self._not_yet_named("collapsed", [k for k, v in numbers.items() if v["data_share"] < _COLLAPSED])
        if drowned:
            rank_zero_warn(
                f"The posterior's noise is larger than the weights in {', '.join(drowned)}: predictions under it are mostly "
                "noise. Raise prior_precision, lower kl_weight, or pass relative_noise=0.3 to bound it."
            )
        if collapsed:
            rank_zero_warn(
                f"The curvature has collapsed in {', '.join(collapsed)}: the data give less than {_COLLAPSED:.0%} of the "
                "precision there, so the posterior is as wide as the prior (or as damping_in_noise) makes it. The layers "
                "are dead, or fitted so well that gradients vanish, or their Hessian is negative, or there are too few data "
                "for this prior_precision."
            )

    def _not_yet_named(self, what: str, layers: list[str]) -> list[str]:
        new = [layer for layer in layers if (what, layer) not in self._named]
        self._named.update((what, layer) for layer in new)
        return new


def diagnose(posterior: AbstractPosterior, shares: dict[str, Tensor], steps: dict[str, Tensor]) -> dict[str, float]:
    """Compute all diagnostics.

    Args:
        posterior: The posterior.
        shares: The fraction of each weight's precision that comes from the data, by name of the parameter.
        steps: The last update of the means, by name; empty if unknown.

    Returns:
        The numbers by the names that `PosteriorDiagnostics` logs.
    """
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


def shares_of_data(optimizer: MeanFieldOptimizer, posterior: AbstractPosterior) -> dict[str, Tensor]:
    """The fraction of each weight's precision that comes from the data; prior and damping give the rest.

    Args:
        optimizer: The optimizer.
        posterior: Its posterior.

    Returns:
        Tensors by name of the parameter, for those with noise.
    """
    groups = {param: group for group in optimizer.param_groups for param in group["params"]}
    without_data = dict(posterior.prior_precision)
    for name, param in optimizer.model.named_parameters():
        if name in without_data and (now := effective(groups[param])).relative_noise is None:
            without_data[name] = without_data[name] + now.noise_damping * now.scale
    return diagnostics.data_shares(posterior, without_data)
