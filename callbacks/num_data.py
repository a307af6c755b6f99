"""N, the number of training examples, from the trainer's data loader; and ρ, the augmentation factor."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import IterableDataset, SubsetRandomSampler

from lightning_bayes.callbacks.default_policy import DefaultPrior
from lightning_bayes.errors import UnknownNumDataError
from lightning_bayes.optim import MeanFieldOptimizer

_HINT = "Pass num_data=... to the callback: the posterior's precision grows with it."


def infer_num_data(trainer: Trainer) -> int:
    """Count the examples of one training epoch.

    The data set's length, cut where the trainer sees less of it (``limit_train_batches``, ``drop_last``, a subset
    sampler). Data augmentation does not change it; use ``data_augmentation_factor``.

    Args:
        trainer: A trainer that fits.

    Returns:
        N.

    Raises:
        UnknownNumDataError: If there are several loaders, or the loader does not know its length in examples.
    """
    if trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()
    loaders = _loaders(trainer)
    if len(loaders) != 1:
        raise UnknownNumDataError(f"There are {len(loaders)} training data loaders, so N is ambiguous. {_HINT}")
    return _examples_of(loaders[0], trainer)


def set_num_data(trainer: Trainer, optimizer: MeanFieldOptimizer, num_data: int | None, prior: DefaultPrior) -> None:
    """Set N, and the prior that an L2 penalty stands for, once the data loader exists.

    Args:
        trainer: A trainer that fits.
        optimizer: The swapped optimizer.
        num_data: N; None asks the data loader.
        prior: Sets the prior precision.
    """
    # The groups tell, and not the defaults: Lightning's tuner restores groups from before the first step.
    unset = [group for group in optimizer.param_groups if group["num_data"] is None]
    if not unset:
        return
    num_data = num_data or infer_num_data(trainer)
    for group in (optimizer.defaults, *unset):  # groups added later inherit the defaults
        group["num_data"] = num_data
        prior.take_penalty(group)
    for group in unset:
        optimizer.hyperparameters.check(group)
    prior.warn_if_strong(unset)


def with_augmentation_factor(options: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """Fill in ρ if it is None: the data module's ``data_augmentation_factor`` if it has one, else 1.

    Args:
        options: Keyword arguments of an optimizer; its ``data_augmentation_factor`` may be None.
        trainer: A trainer that fits.

    Returns:
        The options, with a number.
    """
    if options["data_augmentation_factor"] is not None:
        return dict(options)
    data = getattr(trainer, "datamodule", None)
    factor = float(getattr(data, "data_augmentation_factor", 1.0))
    if factor != 1:
        rank_zero_info(
            f"data_augmentation_factor={factor:g}, from {type(data).__name__}: each augmented example counts as that many. "
            "Pass data_augmentation_factor to the callback to change it."
        )
    return {**options, "data_augmentation_factor": factor}


def _examples_of(loader: Any, trainer: Trainer) -> int:
    dataset, batch_size = getattr(loader, "dataset", None), _batch_size(loader)
    if dataset is None:
        raise UnknownNumDataError(f"{type(loader).__name__} has no data set whose examples could be counted. {_HINT}")
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise UnknownNumDataError(f"The length of a {type(dataset).__name__} is not the number of examples. {_HINT}")
    if batch_size is None and getattr(loader, "batch_sampler", None) is not None:
        raise UnknownNumDataError(
            f"{type(loader.batch_sampler).__name__} has no batch_size, so its batches do not tell how many examples they "
            f"hold. {_HINT}"
        )
    if batch_size is None:
        raise UnknownNumDataError(
            f"{type(loader).__name__} has batch_size=None, so its data set counts batches, not examples. {_HINT}"
        )
    sampler = getattr(loader, "sampler", None)
    examples = len(sampler) if isinstance(sampler, SubsetRandomSampler) else len(dataset)
    if trainer.num_training_batches != float("inf"):
        shares = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        examples = min(examples, int(trainer.num_training_batches) * batch_size * shares)
    return examples


def warn_of_other_examples(trainer: Trainer, seen: set[int]) -> None:
    """Warn if layers see more or fewer examples in a full batch than the data set counts.

    Args:
        trainer: A trainer that fits in one process, at the first batch of an epoch.
        seen: Numbers of examples that the layers saw.
    """
    loaders = _loaders(trainer)
    size = _batch_size(loaders[0]) if loaders else None
    if size is None or len(seen) != 1 or seen == {size} or infer_num_data(trainer) < size:
        return
    rank_zero_warn(
        f"The layers see {next(iter(seen))} examples in a batch for which the data loader has batch_size={size}, so N "
        "and the per-example gradients count different things. Keep one entry of the data set in each row of dimension 0, "
        "all in one call, or pass num_data=..., the number of examples that the layers see in an epoch."
    )


def _loaders(trainer: Trainer) -> list[Any]:
    found = trainer.train_dataloader
    return [] if found is None else CombinedLoader(found).flattened


def _batch_size(loader: Any) -> int | None:
    for source in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(source, "batch_size", None)
        if size is not None:
            return int(size)
    return None
