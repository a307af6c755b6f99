"""Monte-Carlo dropout on an unmodified LightningModule, trained by its own optimizer."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any, final

import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_bayes.callbacks.evaluation import EvaluationCallback, require_single_evaluation
from lightning_bayes.callbacks.validation_samples import sample_count
from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError
from lightning_bayes.predictive import DropoutSamples, Link, dropout_layers


@final
class MCDropoutCallback(EvaluationCallback):
    r"""Averages validation, test and prediction over S passes with dropout (Gal & Ghahramani 2016).

    https://arxiv.org/abs/1506.02142. Training is the module's own, with the user's optimizer and the module's dropout layers
    (`predictive.dropout_layers` says which those are). Without any, `p` and `layers` put dropout behind layers, in training
    and in the sampled passes; behind every convolution and linear layer it is the form of Osawa et al. 2019. Sampled passes
    are reproducible and leave the global random numbers alone.

    Args:
        eval_samples: S, passes in validation, test and prediction; 0 evaluates without dropout.
        val_samples: Passes in validation inside a fit. None: 3, or S if that is smaller or `TemperatureScaling` fits a
            temperature for S passes.
        p: Probability with which the dropout put in sets an output to zero; None puts none in.
        layers: Regular expression that matches the whole names of the layers to put it behind.
        link: How outputs become predictions in evaluation. None: the module's attribute ``link``, else what the training
            loss says, else ``"softmax"``.
        seed: Seed of the sampled passes.

    Raises:
        HyperparameterError: If an argument lies outside of its range, or `p` or `layers` lacks the other.

    Example:
        >>> callback = MCDropoutCallback(eval_samples=32, p=0.1, layers=r"model\.(conv|fc)\d")
    """

    def __init__(
        self,
        eval_samples: int = 10,
        p: float | None = None,
        layers: str | None = None,
        link: Link | None = None,
        seed: int = 0,
        val_samples: int | None = None,
    ) -> None:
        for name, count in (("eval_samples", eval_samples), ("val_samples", val_samples or 0)):
            if count < 0 or count != int(count):
                raise HyperparameterError(f"{name}={count!r} must be a whole number of at least 0.")
        if p is not None and not 0 <= p < 1:
            raise HyperparameterError(f"p={p!r} must be at least 0 and below 1.")
        if (p is None) != (layers is None):
            raise HyperparameterError(
                f"p={p!r} and layers={layers!r} belong together: pass a probability, and a regular expression of the names "
                "of the layers that dropout shall follow; or neither, for the module's own dropout layers."
            )
        if layers is not None:
            _require_pattern(layers)
        super().__init__(link)
        self.val_samples = val_samples
        self.eval_samples, self.p, self.layers, self.seed = eval_samples, p, layers, seed
        # One module stands for every inserted dropout; sampled passes switch it on.
        self._inserted = nn.Dropout(0.0 if p is None else p).eval()
        self._hooks = ExitStack()
        self._hooked: nn.Module | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset."""
        super().setup(trainer, pl_module, stage)
        self.undo()
        require_single_evaluation(trainer)
        if stage == "fit":
            self.evaluation.has_seen_loss = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Insert dropout, and require that there is some."""
        self._layers_of(pl_module)

    def find_samples(self, trainer: Trainer, pl_module: LightningModule) -> DropoutSamples | None:
        """Find the dropout layers.

        Returns:
            Passes with dropout; None if none were asked for.
        """
        layers = self._layers_of(pl_module)
        count = sample_count(trainer, self.eval_samples, self.val_samples)
        return DropoutSamples(layers, count, self.seed) if count else None

    def _layers_of(self, module: LightningModule) -> list[nn.Module]:
        if self.p is not None and self.layers is not None:
            if self._hooked is not module:
                self._insert(module, self.layers)
            return [self._inserted, *dropout_layers(module)]
        found = dropout_layers(module)
        if not found:
            raise UnsupportedLayerError(
                f"{type(module).__name__} has no dropout layer, so all passes would be the same. Build it with nn.Dropout "
                "(calls of torch.nn.functional.dropout are not seen), or pass p=0.1 and layers=..., a regular expression of "
                "the names of the layers that dropout shall follow."
            )
        return found

    def _insert(self, module: LightningModule, pattern: str) -> None:
        self._hooks.close()
        matching = [(name, layer) for name, layer in module.named_modules() if re.fullmatch(pattern, name)]
        if not matching:
            names = [name for name, layer in module.named_modules() if name and not list(layer.children())]
            raise UnsupportedLayerError(
                f"No layer of {type(module).__name__} has a name that layers={pattern!r} matches as a whole. Its layers are "
                f"{', '.join(names)}."
            )
        for name, layer in matching:
            self._hooks.callback(layer.register_forward_hook(self._hook(name)).remove)
        self._hooked = module

    def _hook(self, name: str) -> Any:
        def drop(layer: nn.Module, inputs: Any, output: Any) -> Tensor:
            if not isinstance(output, Tensor):
                raise UnsupportedLayerError(
                    f"Dropout cannot follow {name}, which returns a {type(output).__name__} and not a tensor. Change layers="
                    f"{self.layers!r}."
                )
            return F.dropout(output, self._inserted.p, training=layer.training or self._inserted.training)

        return drop

    def undo(self) -> None:
        """Take the inserted dropout out."""
        super().undo()
        self._hooks.close()
        self._hooked = None

    def state_dict(self) -> dict[str, Any]:
        """The link of the training loss."""
        return {"link": self.evaluation.loss_link}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the link of the training loss."""
        self.evaluation.loss_link = state_dict["link"]


def _require_pattern(layers: str) -> None:
    try:
        re.compile(layers)
    except (re.error, TypeError) as error:
        raise HyperparameterError(f"layers={layers!r} is not a regular expression: {error}.") from error
