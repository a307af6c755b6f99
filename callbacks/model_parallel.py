"""Support of Lightning's `ModelParallelStrategy`, under which FSDP2 shards the weights over processes.

`lightning_bayes.optim.runtime.shards` handles passes and updates. Evaluation gathers the posterior in every process and
shards each weight sample again.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from lightning_bayes.callbacks.evaluation import FinishesSamples
from lightning_bayes.curvature.sharding import is_sharded, shards, whole
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim.readout import read_checkpoint


def is_model_parallel(trainer: Trainer) -> bool:
    """Whether the trainer's strategy is `ModelParallelStrategy`."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def check_model_parallel(trainer: Trainer, module: LightningModule, linearized: bool) -> None:
    """Require a module and an evaluation that support sharded weights; does nothing under other strategies."""
    if not is_model_parallel(trainer):
        return
    name = type(module).__name__
    if not any(is_sharded(param) for param in module.parameters()):
        raise UnsupportedTrainingError(
            f"No parameter of {name} is sharded, but ModelParallelStrategy expects sharded weights. In configure_model call "
            "fully_shard(self.net, mesh=self.device_mesh['data_parallel']), or use strategy='ddp'."
        )
    if shards(module):
        raise UnsupportedTrainingError(
            f"fully_shard was called on {name} itself, so its weights would be gathered once for all weight samples of an "
            "evaluation. Call it on a submodule that holds the weights: fully_shard(self.net, mesh=...)."
        )
    if linearized:
        raise UnsupportedTrainingError(
            "linearized=True differentiates whole weights, but FSDP2 shards them. Omit it, and after the fit use "
            "load_posterior with mc_predict(..., linearized=True)."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, FinishesSamples):
            raise UnsupportedTrainingError(
                f"{type(callback).__name__} runs the network at whole weights, but FSDP2 shards them. Remove it from the "
                "fit, and evaluate the checkpoint with it in one process."
            )


def gathered_weights(module: LightningModule) -> dict[str, Tensor]:
    """The module's whole parameters and buffers by name. All processes must call this together."""
    return {name: whole(value) for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def complete_checkpoint(trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint with the weights and optimizer states that `ModelParallelStrategy` removes from it, read again."""
    path = trainer.ckpt_path
    return read_checkpoint(path) if is_model_parallel(trainer) and path is not None else checkpoint


def require_outside_of_pass(trainer: Trainer) -> None:
    """Refuse to save inside a pass under `ModelParallelStrategy`, with an `UnsupportedTrainingError`."""
    if is_model_parallel(trainer):
        raise UnsupportedTrainingError(
            "A checkpoint cannot be saved inside a pass under ModelParallelStrategy: the strategy has already gathered the "
            "weights, which are a sample. Save in on_train_batch_end or later."
        )
