"""N, the number of training examples, from the trainer's own data loader; and ρ, what augmentation makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import IterableDataset, SubsetRandomSampler

from lightning_bayes.errors import UnknownNumDataError

_HINT = "Pass num_data=... to the callback: the posterior's precision grows with it."


def infer_num_data(trainer: Trainer) -> int:
    """Count the examples of one training epoch.

    The data set's length, cut where the trainer sees less of it (``limit_train_batches``, ``drop_last``, a subset
    sampler). Data augmentation does not change it; that is what ``data_augmentation_factor`` is for.

    Args:
        trainer: A trainer that fits.

    Returns:
        N.

    Raises:
        UnknownNumDataError: If there are several loaders, or the loader does not know its length in examples.
    """
    if trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()
    combined = trainer.fit_loop._combined_loader
    loaders = combined.flattened if combined is not None else []
    if len(loaders) != 1:
        raise UnknownNumDataError(f"There are {len(loaders)} training data loaders, so N is ambiguous. {_HINT}")
    return _examples_of(loaders[0], trainer)


def with_augmentation_factor(options: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """Fill in ρ where nobody has chosen it: the data module's ``data_augmentation_factor`` if it has one, else 1.

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
            f"data_augmentation_factor={factor:g}, as {type(data).__name__} says of its augmented images: each counts as "
            "so many. Pass data_augmentation_factor to the callback to count them otherwise."
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
    """Say so if layers see more or fewer examples in a full batch than the data set counts.

    Args:
        trainer: A trainer that fits in one process, at the first batch of an epoch.
        seen: Numbers of examples that the layers saw.
    """
    combined = trainer.fit_loop._combined_loader
    size = _batch_size(combined.flattened[0]) if combined is not None else None
    if size is None or len(seen) != 1 or seen == {size} or infer_num_data(trainer) < size:
        return
    rank_zero_warn(
        f"The layers see {next(iter(seen))} examples in a batch for which the data loader has batch_size={size}, so N "
        "counts other things than the per-example gradients do. Keep one entry of the data set in each row of dimension 0, "
        "all in one call, or pass num_data=... as the number of what the layers see in an epoch."
    )


def _batch_size(loader: Any) -> int | None:
    for source in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(source, "batch_size", None)
        if size is not None:
            return int(size)
    return None
