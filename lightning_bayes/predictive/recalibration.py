"""BatchNorm statistics of each sample's own.

Running statistics are collected while weights change, and under all samples together; a sampled network has activations of
another mean and variance. Here they are estimated anew under the weights that are evaluated, as the plain average over B
training batches, as `torch.optim.swa_utils.update_bn` does for one network (Izmailov et al. 2018, section 3.2,
https://arxiv.org/abs/1803.05407; Maddox et al. 2019 do so for every sample, https://arxiv.org/abs/1902.02476).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.predictive.samples import NetworkSamples, Samples, placed
from lightning_bayes.private_torch import BatchNormBase

Statistics = dict[str, Tensor]  # running mean, variance and number of batches by buffer name


@final
class SharedStatistics(Samples):
    """Samples with the running statistics of their mean; see `recalibrate`.

    Args:
        samples: The samples.
        statistics: The statistics at their mean.
    """

    def __init__(self, samples: Samples, statistics: Statistics) -> None:
        self.samples, self.count, self.statistics = samples, samples.count, statistics

    def chosen(self, model: nn.Module, forward: Callable[[], Tensor], indices: Iterable[int]) -> Tensor:
        """Run `forward` under some of the samples, with the statistics of the mean.

        Args:
            model: The model.
            forward: Computes the model's output.
            indices: Numbers of the samples.

        Returns:
            Outputs stacked over them.
        """
        with placed(model, self.statistics):
            return self.samples.chosen(model, forward, indices)

    def at_mean(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, `model` is their mean with its statistics."""
        return placed(model, self.statistics)


@final
class RecalibratedSamples(NetworkSamples):
    """Networks with the running statistics that belong to them; see `recalibrate`.

    Args:
        samples: The samples.
        statistics: The statistics of each of them.
        at_mean: The statistics of the model as it is, or None to leave it.
    """

    def __init__(self, samples: NetworkSamples, statistics: Sequence[Statistics], at_mean: Statistics | None) -> None:
        self.samples, self.count, self.has_mean = samples, samples.count, samples.has_mean
        self.statistics, self.mean_statistics = list(statistics), at_mean

    @contextmanager
    def sampled(self, model: nn.Module, index: int) -> Iterator[None]:
        """Inside, `model` is sample `index` with its own statistics.

        Args:
            model: The model.
            index: Number of the sample.

        Yields:
            Nothing.
        """
        with self.samples.sampled(model, index), placed(model, self.statistics[index]):
            yield

    def at_mean(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, `model` is their mean with the statistics of the mean."""
        return placed(model, self.mean_statistics or {})


def recalibrate(
    model: nn.Module,
    samples: Samples,
    batches: Iterable[Callable[[], object]],
    of: Literal["sample", "mean"] = "sample",
    reduce: Callable[[Tensor], Tensor] = lambda statistic: statistic,
) -> Samples:
    """Estimate BatchNorm's running statistics anew for each sample.

    Only BatchNorm layers run in training mode meanwhile; no gradient is taken. Afterwards, also after an exception, the
    model has its own weights, statistics and modes. Each batch passes S times, and once more at the mean where there is one.

    Args:
        model: The model, in evaluation mode.
        samples: Its S samples; each has to be the same network for every batch.
        batches: Each runs the model on one batch of training inputs.
        of: The owner of the statistics: each ``"sample"``, or the ``"mean"`` for all of them.
        reduce: Averages a statistic over processes that have run other batches.

    Returns:
        The samples with their statistics; `samples` if no layer has running statistics.

    Raises:
        HyperparameterError: If there is no batch, `of` is unknown, the samples have no mean or are not fixed, or are no
            networks with statistics of their own.

    Example:
        >>> from lightning_bayes.predictive import MemberSamples
        >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1)).eval()
        >>> members = MemberSamples([{"0.weight": torch.tensor([[1.0]])}, {"0.weight": torch.tensor([[3.0]])}])
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> for s in recalibrate(model, members, [lambda: model(x)]).statistics:
        ...     print(s["1.running_mean"].item())
        1.5
        4.5
    """
    _check(samples, of)
    fresh = {name: torch.zeros_like(value) for name, value in running_statistics(model).items()}
    if not fresh:
        return samples
    which = [*range(samples.count)] if of == "sample" else []
    found: dict[int | None, Statistics] = dict.fromkeys([*which, *([None] if samples.has_mean else [])], fresh)
    with torch.no_grad(), _only_batch_norm_trains(model):
        # All see a batch while it is there: none is kept, and all are estimated from the same ones.
        for run in batches:
            found = {index: _updated(model, samples, index, own, run) for index, own in found.items()}
    if any(own is fresh for own in found.values()):
        raise HyperparameterError("There is no batch to estimate BatchNorm's statistics from. Give at least one.")
    found = {index: {name: reduce(value) for name, value in own.items()} for index, own in found.items()}
    if not isinstance(samples, NetworkSamples) or of == "mean":
        return SharedStatistics(samples, found[None])
    return RecalibratedSamples(samples, [found[index] for index in range(samples.count)], found.get(None))


def _check(samples: Samples, of: str) -> None:
    if of not in {"sample", "mean"}:
        raise HyperparameterError(f"of={of!r} is unknown; say whose statistics: 'sample' or 'mean'.")
    if of == "mean" and not samples.has_mean:
        raise HyperparameterError(f"{type(samples).__name__} have no mean with statistics. Say of='sample'.")
    if not samples.fixed:
        raise HyperparameterError(
            f"{type(samples).__name__} are other networks for every batch, so that none has statistics of its own. Keep "
            "those of training, or recalibrate the point with torch.optim.swa_utils.update_bn."
        )
    if of == "sample" and not isinstance(samples, NetworkSamples):
        raise HyperparameterError(
            f"{type(samples).__name__} are expansions of one network, so that none has statistics of its own. Say of='mean'."
        )


def running_statistics(model: nn.Module) -> Statistics:
    """The buffers in which BatchNorm keeps running statistics.

    Args:
        model: The model.

    Returns:
        The buffers themselves, by name; empty if there are none.
    """
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, layer in _layers(model)
        for name, buffer in layer.named_buffers(recurse=False)
    }


def _layers(model: nn.Module) -> list[tuple[str, BatchNormBase]]:
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BatchNormBase)]
    return [(name, layer) for name, layer in layers if layer.running_mean is not None]


def _updated(
    model: nn.Module, samples: Any, index: int | None, own: Statistics, run: Callable[[], object]
) -> Statistics:
    """Statistics of a sample, or of the mean, after one more batch."""
    with samples.at_mean(model) if index is None else samples.sampled(model, index), placed(model, own):
        run()
        return {name: buffer.clone() for name, buffer in running_statistics(model).items()}


@contextmanager
def _only_batch_norm_trains(model: nn.Module) -> Iterator[None]:
    with ExitStack() as undo:
        for _, layer in _layers(model):
            undo.callback(_set, layer, layer.training, layer.momentum)
            _set(layer, True, None)  # without a momentum it is the plain average over all batches
        yield


def _set(layer: BatchNormBase, training: bool, momentum: float | None) -> None:
    layer.training, layer.momentum = training, momentum
