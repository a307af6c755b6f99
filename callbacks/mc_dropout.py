"""Monte-Carlo dropout on an unmodified LightningModule, trained by the user's optimizer."""

from __future__ import annotations

import re
from typing import Any, final

import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_bayes.callbacks.evaluation.base import EvaluationCallback, require_single_evaluation
from lightning_bayes.callbacks.evaluation.evaluated_posterior import sample_count
from lightning_bayes.callbacks.fit.resume import refuse_noisy_state, warn_of_kept
from lightning_bayes.callbacks.trainer.arguments import checked
from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError, name_some
from lightning_bayes.predictive import DropoutSamples, LinkArgument, dropout_layers
from lightning_bayes.predictive.dropout import inactive_dropout


@final
class MCDropoutCallback(EvaluationCallback):
    r"""Averages validation, test and prediction over S passes with dropout (Gal & Ghahramani 2016).

    https://arxiv.org/abs/1506.02142. Training is unchanged: it uses the user's optimizer and the module's dropout layers
    (see `predictive.dropout_layers`). If the module has none, `p` and `layers` insert dropout after layers, in training and
    in the sampled passes; after every convolution and linear layer, this is the form of Osawa et al. 2019. Sampled passes
    are reproducible and do not change the global random state.

    Args:
        eval_samples: S, passes in validation, test and prediction; 0 evaluates without dropout.
        val_samples: Passes for validation during a fit. None: 3, or S if S is smaller.
        p: Probability with which inserted dropout sets an output to zero; None inserts no dropout.
        layers: Regular expression that matches the full names of the layers after which dropout is inserted.
        link: How outputs become predictions in evaluation. None: the module's attribute ``lightning_bayes_link``, else the
            link of the training loss, else raw outputs are averaged.
        seed: Seed of the sampled passes.
        predict_once: Whether your ``predict_step`` runs once for each batch, with ``self(...)`` averaged inside; by default
            it runs under each sample.

    Raises:
        HyperparameterError: If an argument is out of range, or only one of `p` and `layers` is passed.

    Example:
        >>> callback = MCDropoutCallback(eval_samples=32, p=0.1, layers=r"model\.(conv|fc)\d")
    """

    @checked
    def __init__(
        self,
        eval_samples: int = 10,
        p: float | None = None,
        layers: str | None = None,
        link: LinkArgument | None = None,
        seed: int = 0,
        val_samples: int | None = None,
        predict_once: bool = False,
    ) -> None:
        for name, count in (("eval_samples", eval_samples), ("val_samples", val_samples or 0)):
            if count < 0 or count != int(count):
                raise HyperparameterError(f"{name}={count!r} must be a whole number of at least 0.")
        if p is not None and not 0 < p < 1:
            raise HyperparameterError(f"p={p!r} must be above 0, or all passes would be the same, and below 1.")
        if (p is None) != (layers is None):
            raise HyperparameterError(
                f"p={p!r} and layers={layers!r} belong together: pass a probability, and a regular expression for the names "
                "of the layers after which to insert dropout; or pass neither to use the module's own dropout layers."
            )
        if layers is not None:
            _require_pattern(layers)
        super().__init__(link)
        self.predict_once = predict_once
        self.val_samples = val_samples
        self.eval_samples, self.p, self.layers, self.seed = eval_samples, p, layers, seed
        # One module represents all inserted dropout; sampled passes set it to training mode.
        self._inserted = nn.Dropout(0.0 if p is None else p).eval()
        self._has_inserted = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Require that no other callback averages predictions."""
        super().setup(trainer, pl_module, stage)
        require_single_evaluation(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Insert dropout, and require at least one dropout layer."""
        self._layers_of(pl_module)

    def find_samples(self, trainer: Trainer, pl_module: LightningModule) -> DropoutSamples | None:
        """Passes with dropout; None if their number is 0."""
        layers = self._layers_of(pl_module)
        count = sample_count(trainer, self.eval_samples, self.val_samples)
        return DropoutSamples(layers, count, self.seed) if count else None

    def _layers_of(self, module: LightningModule) -> list[nn.Module]:
        if self.p is not None and self.layers is not None:
            if not self._has_inserted:
                self._insert(module, self.layers)
            return [self._inserted, *dropout_layers(module)]
        layers = dropout_layers(module)
        if not layers:
            inactive = inactive_dropout(module)
            found = f"only dropout layers that drop nothing ({name_some(inactive)})" if inactive else "no dropout layer"
            raise UnsupportedLayerError(
                f"{type(module).__name__} has {found}, so all passes would be the same. Build it with dropout (calls of "
                "torch.nn.functional.dropout are not detected), or pass p=0.1 and layers=..., a regular expression for "
                "the names of the layers after which to insert dropout."
            )
        return layers

    def _insert(self, module: LightningModule, pattern: str) -> None:
        matching = [(name, layer) for name, layer in module.named_modules() if re.fullmatch(pattern, name)]
        if not matching:
            names = [name for name, layer in module.named_modules() if name and not list(layer.children())]
            raise UnsupportedLayerError(
                f"layers={pattern!r} matches no full layer name of {type(module).__name__}. Its layers are "
                f"{', '.join(names)}."
            )
        for name, layer in matching:
            self._patches.on_undo(layer.register_forward_hook(self._hook(name)).remove)
        self._patches.set(self, "_has_inserted", True)

    def _hook(self, name: str) -> Any:
        def drop(layer: nn.Module, inputs: Any, output: Any) -> Tensor:
            if not isinstance(output, Tensor):
                raise UnsupportedLayerError(
                    f"Dropout cannot follow {name}, which returns a {type(output).__name__}, not a tensor. Change layers="
                    f"{self.layers!r}."
                )
            return F.dropout(output, self._inserted.p, training=layer.training or self._inserted.training)

        return drop

    def state_dict(self) -> dict[str, Any]:
        """What the training loss told, and the dropout that was inserted."""
        return {**self.loss_state(), "p": self.p, "layers": self.layers}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Check that a fit can resume; raises `PosteriorError` if a noisy optimizer wrote its state."""
        if trainer.state.fn == "fit":
            refuse_noisy_state(checkpoint, type(self).__name__)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what the training loss told; warn if other dropout is inserted now."""
        self.load_loss_state(state_dict)
        now = {"p": self.p, "layers": self.layers}
        warn_of_kept(type(self).__name__, state_dict, now, "the checkpoint was trained with other dropout,")


def _require_pattern(layers: str) -> None:
    try:
        re.compile(layers)
    except re.error as error:
        raise HyperparameterError(f"layers={layers!r} is not a regular expression: {error}.") from error
