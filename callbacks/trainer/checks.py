"""Requirements on the trainer, the module and the optimizer, checked before anything is swapped; and on other ranks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_bayes.callbacks.trainer.private_lightning import check_private_symbols
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim import NoisyOptimizer, VariationalOptimizer
from lightning_bayes.optim.hyperparameters import StepRule
from lightning_bayes.strategies import BayesDDPStrategy, check_agreement

_NO_LENGTH = (torch.optim.Adadelta, torch.optim.Rprop)  # whose learning rate does not set the length of a step


def refuse_other_package(trainer: Trainer) -> None:
    """Refuse a trainer of the package pytorch_lightning."""
    if type(trainer).__module__.startswith("pytorch_lightning."):
        raise UnsupportedTrainingError(
            f"{type(trainer).__name__} comes from pytorch_lightning, whose classes differ from those of lightning.pytorch. "
            "Import the Trainer, the LightningModule and the callbacks from lightning.pytorch."
        )


def check_trainer(trainer: Trainer, stage: str, callback: str) -> None:
    """Refuse trainers of another package; warn of a fit in processes that end with it, as under ``ddp_spawn``."""
    refuse_other_package(trainer)
    starts_processes = hasattr(trainer.strategy.launcher, "get_extra_results")  # for one run, and not for the script
    if starts_processes and stage == "fit":
        rank_zero_warn(
            f"{callback}: the processes of this fit end with it, and the main process gets the weights without what the "
            "callback has found. Save checkpoints, and pass ckpt_path='best', or the path of one, to test and predict; or "
            "fit with strategy='ddp'."
        )


def check_training(trainer: Trainer, pl_module: LightningModule) -> None:
    """Require a training set-up that a noisy optimizer can be swapped into."""
    if not pl_module.automatic_optimization:
        raise UnsupportedTrainingError(
            f"{type(pl_module).__name__} uses manual optimization, where the callback sees no steps. Build the optimizer "
            "yourself, opt = lightning_bayes.VOGN(self, num_data=N), and train with `with opt.sampled_params(): "
            "loss.backward()` and opt.step()."
        )
    check_strategy(trainer)
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise UnsupportedTrainingError(
            f"{type(pl_module).__name__}.training_step takes dataloader_iter, so each weight sample would consume another "
            "batch. Take batch as the argument instead."
        )
    check_private_symbols(trainer)


def check_strategy(trainer: Trainer) -> None:
    """Refuse strategies that split or move parameters."""
    is_sharding = isinstance(trainer.strategy, DeepSpeedStrategy)  # a subclass of DDPStrategy
    if is_sharding or not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise UnsupportedTrainingError(
            f"The strategy {type(trainer.strategy).__name__} splits or moves parameters in ways that the callbacks' passes, "
            "evaluation and checkpoints do not support. Use one device, strategy='ddp' or 'bayes_ddp', with adapters (LoRA) "
            "if memory is short."
        )


def check_swappable(optimizers: list[Optimizer], module: nn.Module, step_rule: StepRule) -> Optimizer:
    """Require one ordinary first-order optimizer of parameters of `module`."""
    if len(optimizers) != 1 or not optimizers[0].param_groups:
        names = ", ".join(type(o).__name__ for o in optimizers if o.param_groups)  # Lightning's dummy has no groups
        raise UnsupportedTrainingError(
            f"The callback swaps one optimizer, and configure_optimizers returned {names or 'None'}. Return one optimizer "
            "over the parameters to learn."
        )
    old = optimizers[0]
    _check_params(old, module)
    if isinstance(old, NoisyOptimizer):
        raise UnsupportedTrainingError(
            f"The optimizer already is {type(old).__name__}, from configure_optimizers or from a second callback. Return "
            "Adam, AdamW or SGD from configure_optimizers and use one callback, or remove the callback."
        )
    if any(group["lr"] is None for group in old.param_groups):
        raise UnsupportedTrainingError(
            f"{type(old).__name__} has no learning rate (lr=None) and chooses the length of each step itself, so it cannot "
            "bound the noisy step. Pass it a number, such as lr=1e-3 (Adafactor: with relative_step=False), or return Adam, "
            "AdamW or SGD."
        )
    if all("train_mode" in group for group in old.param_groups) and hasattr(old, "train"):
        raise UnsupportedTrainingError(
            f"{type(old).__name__} is schedule-free: it trains and evaluates different weights, so the posterior has no "
            "unique mean. Return Adam, AdamW or SGD with a schedule from configure_optimizers."
        )
    if isinstance(old, torch.optim.LBFGS):
        raise UnsupportedTrainingError(
            "LBFGS calls its closure several times per step, each time with other noise, which breaks its line search. "
            "Return Adam, AdamW or SGD from configure_optimizers."
        )
    if step_rule == "user":
        _require_single_gradient(old)
    if isinstance(old, _NO_LENGTH) and step_rule == "trust_region":
        raise UnsupportedTrainingError(
            f"The learning rate of {type(old).__name__} is not the length of a step, so it cannot bound the noisy step. "
            "Pass lr=... to the callback, or return Adam, AdamW or SGD."
        )
    if any(group.get("maximize") for group in old.param_groups):
        raise UnsupportedTrainingError("maximize=True: a posterior needs a negative log-likelihood to minimise.")
    return old


def _require_single_gradient(old: Optimizer) -> None:
    """Refuse optimizers that compute the gradient again within a step, and those of sparse gradients."""
    closure = inspect.signature(old.step).parameters.get("closure")
    is_required = closure is not None and closure.default is inspect.Parameter.empty
    if is_required or (hasattr(old, "first_step") and hasattr(old, "second_step")):  # as in SAM
        raise UnsupportedTrainingError(
            f"{type(old).__name__} computes the gradient twice per step, as SAM does, and the callback computes it once, at "
            "weight samples, whose noise already favours flat minima. Return Adam, AdamW or SGD, such as the optimizer that "
            f"{type(old).__name__} wraps."
        )
    if isinstance(old, torch.optim.SparseAdam):
        raise UnsupportedTrainingError(
            "SparseAdam needs sparse gradients, which have no curvature for the rows left out. Return Adam or AdamW, and "
            "build the embeddings with sparse=False."
        )


def require_dense_gradients(optimizer: VariationalOptimizer) -> None:
    """Refuse embeddings with sparse gradients, unless the user's optimizer alone trains them."""
    for name, layer in optimizer.model.named_modules():
        if not (
            isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight in optimizer.state
        ):
            continue
        if optimizer.base_step is None or optimizer.state[layer.weight].get("noisy", True):
            raise UnsupportedTrainingError(
                f"{name} ({layer}) has sparse gradients, from which no curvature is measured. Build it with sparse=False, "
                "or leave it out of bayesian= and let SGD train it."
            )


def _check_params(old: Optimizer, module: nn.Module) -> None:
    params = [p for group in old.param_groups for p in group["params"]]
    module_params = set(module.parameters())
    foreign_shapes = [tuple(p.shape) for p in params if p not in module_params]
    if foreign_shapes:
        raise UnsupportedTrainingError(
            f"The optimizer holds parameters that {type(module).__name__} does not, of the shapes {foreign_shapes}, so "
            "their curvature cannot be measured. Make the layer that owns them a submodule."
        )
    if not any(p.requires_grad for p in params):
        raise UnsupportedTrainingError(
            f"{type(module).__name__} has no trainable parameter in its optimizer. Set requires_grad_(True) on the "
            "parameters to train."
        )


def require_agreement(trainer: Trainer, optimizer: VariationalOptimizer, mc_samples: int) -> None:
    """Require equal settings on all ranks before the first update, once the optimizer's groups have N."""
    settings: dict[str, Any] = {
        "optimizer": type(optimizer).__name__,
        "mc_samples": mc_samples,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "the number of batches": trainer.num_training_batches,
    }
    for index, group in enumerate(optimizer.param_groups):
        suffix = f" (group {index})" if len(optimizer.param_groups) > 1 else ""
        entries = {**group, **group["posterior"]}
        settings |= {f"{n}{suffix}": value for n, value in entries.items() if n not in {"params", "posterior"}}
        settings[f"parameters{suffix}"] = [tuple(param.shape) for param in group["params"]]
    strategy = trainer.strategy
    check = strategy.check_agreement if isinstance(strategy, BayesDDPStrategy) else check_agreement
    check(settings)
