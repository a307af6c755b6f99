"""Recalibrate BatchNorm: estimate the running statistics anew for each sample.

Training updates the running statistics while weights change, and under all samples together. A sampled network has
activations with a different mean and variance. Recalibration estimates the statistics under the weights that are evaluated,
as the plain average over training batches. `torch.optim.swa_utils.update_bn` does the same for one network (Izmailov et al.
2018, section 3.2, https://arxiv.org/abs/1803.05407), Maddox et al. 2019 for every sample (https://arxiv.org/abs/1902.02476).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.predictive.repeated import Repeatable
from lightning_bayes.predictive.samples import NetworkSamples, Samples
from lightning_bayes.predictive.weights import temporary_weights
from lightning_bayes.private_torch import BatchNormBase

Statistics = dict[str, Tensor]  # running mean, variance and number of batches by buffer name


@final
class SharedStatistics(Samples):
    """Samples that all use the running statistics of their mean; see `recalibrate`."""

    def __init__(self, samples: Samples, statistics: Statistics) -> None:
        self.samples, self.count, self.statistics = samples, samples.count, statistics

    def subset_outputs(self, model: nn.Module, forward: Callable[[], Any], indices: Iterable[int]) -> Any:
        """Run `forward` under a subset of the samples, with the statistics of the mean."""
        with temporary_weights(model, self.statistics):
            return self.samples.subset_outputs(model, forward, indices)

    def at_mean(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which `model` is the mean of the samples, with its statistics."""
        return temporary_weights(model, self.statistics)


@final
class RecalibratedSamples(NetworkSamples):
    """Sampled networks that each have their own running statistics; None at the mean keeps the model's."""

    def __init__(self, samples: NetworkSamples, statistics: Sequence[Statistics], at_mean: Statistics | None) -> None:
        self.samples, self.count, self.has_mean = samples, samples.count, samples.has_mean
        self.statistics, self.mean_statistics = list(statistics), at_mean

    @contextmanager
    def sampled(self, model: nn.Module, index: int) -> Iterator[None]:
        """Context in which `model` is sample `index` with its statistics."""
        with self.samples.sampled(model, index), temporary_weights(model, self.statistics[index]):
            yield

    def at_mean(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which `model` is the mean of the samples, with its statistics."""
        return temporary_weights(model, self.mean_statistics or {})


def recalibrate(
    model: nn.Module,
    samples: Samples,
    batches: Iterable[Callable[[], object]],
    of: Literal["sample", "mean"] = "sample",
    reduce: Callable[[Tensor], Tensor] = lambda statistic: statistic,
) -> Samples:
    """Estimate BatchNorm's running statistics anew for each sample.

    While the batches run, only BatchNorm layers are in training mode, and no gradients are computed. The model's weights,
    statistics and modes are restored afterwards, also after an exception. Each batch runs once at the mean, if the samples
    have one, and for ``of="sample"`` also once under each sample.

    Args:
        model: The model, in evaluation mode.
        samples: Its S samples. Each must be the same network for every batch.
        batches: Functions that each run the model on one batch of training inputs.
        of: ``"sample"`` estimates separate statistics for each sample; ``"mean"`` estimates them once, at the mean, for all
            samples.
        reduce: Averages a statistic over processes that each run different batches.

    Returns:
        The samples with their statistics, or `samples` unchanged if no layer has running statistics.

    Raises:
        HyperparameterError: If there is no batch, `of` is unknown, or the samples do not allow these statistics.
    """
    _check(samples, of)
    initial = {name: torch.zeros_like(value) for name, value in running_statistics(model).items()}
    if not initial:
        return samples
    indices: list[int | None] = [*range(samples.count)] if of == "sample" else []
    if samples.has_mean:
        indices.append(None)  # the mean
    statistics = dict.fromkeys(indices, initial)
    num_batches = 0
    with torch.no_grad(), _only_batch_norm_trains(model):
        # Every sample runs on a batch before the next batch is loaded, so no batch has to be stored.
        for run in batches:
            num_batches += 1
            if isinstance(run, Repeatable):
                run.keeps_buffers = False  # each sample updates the statistics
            for index in indices:
                statistics[index] = _updated(model, samples, index, statistics[index], run)
    if num_batches == 0:
        raise HyperparameterError("There is no batch to estimate BatchNorm's statistics from. Pass at least one.")
    for index in indices:
        statistics[index] = {name: reduce(value) for name, value in statistics[index].items()}
    if not isinstance(samples, NetworkSamples) or of == "mean":
        return SharedStatistics(samples, statistics[None])
    return RecalibratedSamples(samples, [statistics[index] for index in range(samples.count)], statistics.get(None))


def _check(samples: Samples, of: str) -> None:
    if of not in {"sample", "mean"}:
        raise HyperparameterError(f"of={of!r} is unknown; use 'sample' or 'mean'.")
    if of == "mean" and not samples.has_mean:
        raise HyperparameterError(f"{type(samples).__name__} have no mean to estimate statistics at. Use of='sample'.")
    if not samples.fixed:
        raise HyperparameterError(
            f"{type(samples).__name__} are different networks for every batch, so no statistics belong to a sample. Keep "
            "the statistics from training, or recalibrate the point estimate with torch.optim.swa_utils.update_bn."
        )
    if of == "sample" and not isinstance(samples, NetworkSamples):
        raise HyperparameterError(
            f"{type(samples).__name__} are expansions of one network and cannot use separate statistics. Use of='mean'."
        )


def running_statistics(model: nn.Module) -> Statistics:
    """Return the buffers of BatchNorm's running statistics, not copied, by name; empty if there are none."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, layer in _layers(model)
        for name, buffer in layer.named_buffers(recurse=False)
    }


def _layers(model: nn.Module) -> list[tuple[str, BatchNormBase]]:
    """BatchNorm layers with running statistics, by name."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BatchNormBase)]
    return [(name, layer) for name, layer in layers if layer.running_mean is not None]


def _updated(
    model: nn.Module, samples: Any, index: int | None, statistics: Statistics, run: Callable[[], object]
) -> Statistics:
    """Statistics of sample `index`, or of the mean for None, after one more batch."""
    with (
        samples.at_mean(model) if index is None else samples.sampled(model, index),
        temporary_weights(model, statistics),
    ):
        run()
        return {name: buffer.clone() for name, buffer in running_statistics(model).items()}


@contextmanager
def _only_batch_norm_trains(model: nn.Module) -> Iterator[None]:
    """Context in which BatchNorm layers are in training mode and their statistics are plain averages over batches."""
    with ExitStack() as undo:
        for _, layer in _layers(model):
            undo.callback(_set, layer, layer.training, layer.momentum)
            _set(layer, True, None)  # momentum=None averages over all batches
        yield


def _set(layer: BatchNormBase, training: bool, momentum: float | None) -> None:
    layer.training, layer.momentum = training, momentum
