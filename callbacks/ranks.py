"""What the ranks of a fit must agree on."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lightning_bayes.optim import VariationalOptimizer
from lightning_bayes.strategies import BayesDDPStrategy, check_agreement


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
