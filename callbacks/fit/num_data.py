"""N, the number of training examples, from the trainer's data loader; and ρ, the augmentation factor."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import IterableDataset, SubsetRandomSampler

from lightning_bayes.curvature import Capture
from lightning_bayes.errors import UnknownNumDataError
from lightning_bayes.optim import VariationalOptimizer
from lightning_bayes.optim.effective import effective

_STRONG_PRIOR = 10.0  # a prior precision that hurt small networks
_HINT = "Pass num_data=... to the callback: the posterior's precision grows with it."


def infer_num_data(trainer: Trainer) -> int:
    """Count the examples of one training epoch."""
    if trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()
    loaders = _loaders(trainer)
    if len(loaders) != 1:
        raise UnknownNumDataError(f"There are {len(loaders)} training data loaders, so N is ambiguous. {_HINT}")
    return _examples_of(loaders[0], trainer)


def set_num_data(trainer: Trainer, optimizer: VariationalOptimizer, num_data: int | None) -> None:
    """Set N; ``num_data=None`` counts the examples of the current data loader. The prior of an L2 penalty follows."""
    # The groups, not the defaults: a resumed run restores them, and Lightning's tuner those from before the first step.
    old = optimizer.param_groups[0]["posterior"]["num_data"]
    new = infer_num_data(trainer) if num_data is None else old or num_data
    if new == old:
        optimizer.posterior_defaults["num_data"] = new
        return
    optimizer.set_num_data(new)
    if old is not None:
        rank_zero_info(f"The training data now have {new:,} examples (before: {old:,}); N follows.")


def warn_of_strong_prior(optimizer: VariationalOptimizer) -> None:
    """After the first update, which shows how many examples share an L2 penalty, warn if it is a strong prior."""
    strongest = max(optimizer.param_groups, key=lambda group: effective(group).prior_precision)
    precision = effective(strongest).prior_precision
    if optimizer.num_updates == 1 and strongest["posterior"]["decay"] == "prior" and precision > _STRONG_PRIOR:
        rank_zero_warn(
            f"weight_decay={strongest['weight_decay']:g} with {effective(strongest).num_data:g} examples implies a prior "
            f"precision of {precision:.4g}, which is strong. Pass prior_precision=1.0 for a weaker prior."
        )


def with_augmentation_factor(hyperparameters: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """Hyperparameters of a group in which ρ=None is replaced by the data module's ``data_augmentation_factor``, else 1."""
    if hyperparameters["data_augmentation_factor"] is not None:
        return dict(hyperparameters)
    data = getattr(trainer, "datamodule", None)
    factor = float(getattr(data, "data_augmentation_factor", 1.0))
    if factor != 1:
        rank_zero_info(
            f"data_augmentation_factor={factor:g}, from {type(data).__name__}: each example counts {factor:g} times. Pass "
            "data_augmentation_factor to the callback to change it."
        )
    return {**hyperparameters, "data_augmentation_factor": factor}


def _examples_of(loader: Any, trainer: Trainer) -> int:
    dataset, batch_size = getattr(loader, "dataset", None), _batch_size(loader)
    if dataset is None:
        raise UnknownNumDataError(f"{type(loader).__name__} has no data set to count examples in. {_HINT}")
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise UnknownNumDataError(f"The length of a {type(dataset).__name__} is not the number of examples. {_HINT}")
    if batch_size is None and getattr(loader, "batch_sampler", None) is not None:
        raise UnknownNumDataError(
            f"{type(loader.batch_sampler).__name__} has no batch_size, so the number of examples is unknown. {_HINT}"
        )
    if batch_size is None:
        raise UnknownNumDataError(
            f"{type(loader).__name__} has batch_size=None, so its data set counts batches, not examples. {_HINT}"
        )
    sampler = getattr(loader, "sampler", None)
    examples = len(sampler) if isinstance(sampler, SubsetRandomSampler) else len(dataset)
    if trainer.num_training_batches != float("inf"):
        replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        examples = min(examples, int(trainer.num_training_batches) * batch_size * replicas)
    return examples


def check_example_count(trainer: Trainer, capture: Capture) -> None:
    """Warn if the layers see another number of examples in the first pass than the data loader yields."""
    counts = set().union(*capture.sizes.values())
    loaders = _loaders(trainer)
    batch_size = _batch_size(loaders[0]) if loaders else None
    if batch_size is None or len(counts) != 1 or counts == {batch_size} or infer_num_data(trainer) < batch_size:
        return
    rank_zero_warn(
        f"The layers see {next(iter(counts))} examples per batch, but the data loader has batch_size={batch_size}, so N "
        "and the per-example gradients count different things. Pass one example per row of dimension 0, in one forward "
        "call, or pass num_data=..., the number of examples that the layers see in an epoch."
    )


def _loaders(trainer: Trainer) -> list[Any]:
    loaders = trainer.train_dataloader
    return [] if loaders is None else CombinedLoader(loaders).flattened


def _batch_size(loader: Any) -> int | None:
    for source in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(source, "batch_size", None)
        if size is not None:
            return int(size)
    return None
