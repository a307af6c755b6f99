"""Lightning's `ModelParallelStrategy`, under which FSDP2 spreads the weights over processes.

Passes and updates follow `lightning_bayes.optim.runtime.shards`. Evaluation gathers the posterior in every process, and each
weight sample is cut into the processes' rows again.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from lightning_bayes.callbacks.evaluation import FinishesSamples
from lightning_bayes.curvature.spread import is_spread, shards, whole
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim.readout import read_checkpoint


def is_model_parallel(trainer: Trainer) -> bool:
    """Whether the trainer's strategy is `ModelParallelStrategy`."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def check_model_parallel(trainer: Trainer, module: LightningModule, linearized: bool) -> None:
    """Require a module and an evaluation that spread weights allow; nothing is required under other strategies.

    Args:
        trainer: The trainer; `configure_model` has run.
        module: The user's module.
        linearized: Whether predictions are linearised.

    Raises:
        UnsupportedTrainingError: Naming what is in the way.
    """
    if not is_model_parallel(trainer):
        return
    name = type(module).__name__
    if not any(is_spread(param) for param in module.parameters()):
        raise UnsupportedTrainingError(
            f"No parameter of {name} is spread over processes, as ModelParallelStrategy asks for. In configure_model call "
            "fully_shard(self.net, mesh=self.device_mesh['data_parallel']), or use strategy='ddp'."
        )
    if shards(module):
        raise UnsupportedTrainingError(
            f"fully_shard was called on {name} itself, which gathers its weights once for all weight samples of an "
            "evaluation. Call it on a submodule that holds the weights: fully_shard(self.net, mesh=...)."
        )
    if linearized:
        raise UnsupportedTrainingError(
            "linearized=True differentiates whole weights, and FSDP2 spreads them over processes. Leave it out, and use "
            "load_posterior with mc_predict(..., linearized=True) after the fit."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, FinishesSamples):
            raise UnsupportedTrainingError(
                f"{type(callback).__name__} runs the network at whole weights, and FSDP2 spreads them over processes. "
                "Evaluate the checkpoint with it in one process."
            )


def gathered_weights(module: LightningModule) -> dict[str, Tensor]:
    """The module's whole parameters and buffers by name; all processes have to call this together."""
    return {name: whole(value) for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def complete_checkpoint(trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint with its weights and optimizer states, which `ModelParallelStrategy` takes out.

    Args:
        trainer: The trainer, which evaluates.
        checkpoint: The checkpoint as the strategy returns it.

    Returns:
        The whole checkpoint, read again; as it was under other strategies.
    """
    path = trainer.ckpt_path
    return read_checkpoint(path) if is_model_parallel(trainer) and path is not None else checkpoint


def require_outside_of_pass(trainer: Trainer) -> None:
    """Refuse to save inside a pass.

    Args:
        trainer: The trainer, whose optimizer has a pass open.

    Raises:
        UnsupportedTrainingError: Under `ModelParallelStrategy`.
    """
    if is_model_parallel(trainer):
        raise UnsupportedTrainingError(
            "A checkpoint cannot be saved inside a pass under ModelParallelStrategy: the weights are a sample, and the "
            "strategy has gathered them. Save in on_train_batch_end or later."
        )
