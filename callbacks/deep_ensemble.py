"""Deep ensembles of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, final

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_bayes.callbacks.evaluation import EvaluationCallback
from lightning_bayes.errors import HyperparameterError, PosteriorError
from lightning_bayes.optim.readout import POSTERIOR_KEY, callback_state, posterior_from_checkpoint, read_checkpoint
from lightning_bayes.predictive import Link, MemberPosteriors, MemberSamples, NetworkSamples, misfits


@final
class DeepEnsembleCallback(EvaluationCallback):
    """Averages test, prediction and validation over M independently trained networks (Lakshminarayanan et al. 2017).

    https://arxiv.org/abs/1612.01474. Train the members with any config, each with another seed, and evaluate them together.
    The module's own weights are not used, and are restored afterwards::

        for seed in 0 1 2 3 4; do
            lightning-bayes fit --config digits+lenet5+adam --seed_everything $seed
        done
        members=$(ls runs/digits_lenet5_adam/version_*/checkpoints/last.ckpt | paste -sd,)
        ensemble="--trainer.callbacks+=lightning_bayes.DeepEnsembleCallback --trainer.callbacks.members=[$members]"
        lightning-bayes test --config digits+lenet5+adam $ensemble

    A member trained by a `VariationalCallback` contributes its posterior mean, or `samples` draws from its posterior. With
    members trained with `SWAGCallback`, this is Multi-SWAG (Wilson & Izmailov 2020, https://arxiv.org/abs/2002.08791).
    Validation during a fit is unchanged.

    Args:
        members: Paths of M Lightning checkpoints.
        samples: Weight samples of each member's posterior; 0 uses its mean.
        seed: The seed of these samples.
        link: How outputs become predictions in evaluation. None: the module's
            attribute ``lightning_bayes_link``, else the link of the training loss, else raw outputs are averaged.

    Raises:
        HyperparameterError: If `members` is empty or a single path, or `samples` is not a whole number of at least 0.
    """

    opt_out_hint = "remove DeepEnsembleCallback"

    def __init__(
        self, members: Sequence[str | os.PathLike[str]], link: Link | None = None, samples: int = 0, seed: int = 0
    ) -> None:
        if isinstance(members, (str, os.PathLike)) or not members:
            raise HyperparameterError(f"members={members!r} must be a list of at least one checkpoint path.")
        if samples < 0 or samples != int(samples):
            raise HyperparameterError(f"samples={samples!r} must be a whole number of at least 0.")
        super().__init__(link)
        self.samples, self.seed = samples, seed
        self.members = [os.fspath(path) for path in members]

    def find_samples(self, trainer: Trainer, pl_module: LightningModule) -> NetworkSamples | None:
        """The members, or samples of their posteriors; None in a fit."""
        if trainer.state.fn == "fit":
            return None
        # Load one at a time, because a checkpoint also holds the optimizer's state.
        if not self.samples:
            return MemberSamples([_weights(self._checkpoint(path, pl_module), pl_module) for path in self.members])
        posteriors = [
            posterior_from_checkpoint(self._checkpoint(path, pl_module), path).to(pl_module.device)
            for path in self.members
        ]
        return MemberPosteriors(posteriors, self.samples, self.seed)

    def _checkpoint(self, path: str, module: LightningModule) -> dict[str, Any]:
        checkpoint = read_checkpoint(path)
        mismatch = misfits(module, checkpoint["state_dict"])
        if mismatch:
            raise PosteriorError(
                f"The member {path} is not a {type(module).__name__} of this architecture ({mismatch}). Build the module "
                "with the arguments that the member was trained with."
            )
        states = (callback_state(checkpoint), checkpoint.get("callbacks", {}).get(POSTERIOR_KEY, {}))
        self.loss_link = self.loss_link or next((state["link"] for state in states if state.get("link")), None)
        return checkpoint


def _weights(checkpoint: dict[str, Any], module: LightningModule) -> dict[str, Tensor]:
    weights = checkpoint["state_dict"].items()
    return {name: value.to(module.device) for name, value in weights if isinstance(value, Tensor)}
