"""Averages what a user's step returns under each sample, with the uncertainty beside it in dictionaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_bayes.likelihood.paths import children_of, rebuilt
from lightning_bayes.predictive.nested import most_frequent

Columns = dict[str, Any]  # by name, such as ``variance``


@final
class Results:
    """The average of results, each number by its own samples.

    In a dictionary, real values ``price`` get ``price_variance``, ``price_lower`` and ``price_upper``, and ``mean`` gets
    ``variance``, ``lower`` and ``upper``. Whole numbers ``label`` get ``label_share``, the fraction of samples that agree.
    Entries of these names stay the user's. What is the same under all samples gets nothing.
    """

    def __init__(self, name: str, interval: float) -> None:
        self.name, self.interval = name, interval
        self._varies: dict[
            tuple[Any, ...], bool
        ] = {}  # by path, as in the first batch: all batches have the same columns
        self._has_told = False
        self._forms: Sequence[Tensor] = ()  # of the current batch
        self._of_forward: Columns = {}  # summary of the only output of ``forward``; empty for several

    def averaged(self, first: Any, samples: Sequence[Any], forms: Sequence[Tensor], of_forward: Columns) -> Any:
        """The average of the results of `samples`, with what has no mean from the `first` run."""
        self._forms, self._of_forward = forms, of_forward
        result, columns = self._merged((), first, samples)
        if columns:
            self._tell(first)
        return beside(result, {n: v for n, v in of_forward.items() if n in {"entropy", "mutual_information"}})

    def _merged(self, path: tuple[Any, ...], first: Any, samples: Sequence[Any]) -> tuple[Any, Columns]:
        """One value of the result, and the columns beside it."""
        entries = [children_of(value) for value in samples]
        keys = children_of(first)
        if keys is None or any(each is None or each.keys() != keys.keys() for each in entries):
            return self._leaf(path, first, samples)
        merged, named = Columns(), Columns()
        for key, value in keys.items():
            of_samples = [each[key] for each in entries if each is not None]
            merged[key], columns = self._merged((*path, key), value, of_samples)
            named |= {name if key == "mean" else f"{key}_{name}": column for name, column in columns.items()}
        if isinstance(first, Mapping):
            return beside(rebuilt(first, merged), named), {}
        return rebuilt(first, merged), named

    def _leaf(self, path: tuple[Any, ...], first: Any, samples: Sequence[Any]) -> tuple[Any, Columns]:
        if isinstance(first, np.ndarray):
            value, columns = self._leaf(path, torch.as_tensor(first), list(map(torch.as_tensor, samples)))
            return value.numpy(), {name: column.numpy() for name, column in columns.items()}
        if isinstance(first, float) and all(isinstance(sample, float) for sample in samples):
            return sum(samples) / len(samples), {}
        if not all(isinstance(value, Tensor) and value.shape == getattr(first, "shape", None) for value in samples):
            return first, {}
        values = torch.stack(list(samples))
        if not self._varies.setdefault(path, not bool((values == values[0]).all())):
            return first, {}
        if not values.is_floating_point():
            mode, share = most_frequent(values, first)
            return mode, {"share": share}
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        mean, columns = moments(values, self.interval)
        is_output = any(_are_close(values, form) for form in self._forms)  # such as logits, whose average is no mean
        value = first if is_output else mean.to(first.dtype)
        return value, {**columns, **_noise(mean, columns["variance"], self._of_forward)}

    def _tell(self, result: Any) -> None:
        """Say once how to get the uncertainty of what is not in a dictionary."""
        if not self._has_told:
            self._has_told = True
            rank_zero_info(
                f"{self.name}.predict_step returns a {type(result).__name__}, which holds averages over samples and no "
                "uncertainty. Return a dict to get the variance and an interval beside each entry."
            )


def beside(result: Any, columns: Columns) -> Any:
    """A dictionary with more columns, its own entries unchanged; another result as it is."""
    if not isinstance(result, Mapping):
        return result
    new = {name: column for name, column in columns.items() if name not in result}
    return rebuilt(result, {**result, **new})


def moments(values: Tensor, interval: float) -> tuple[Tensor, Columns]:
    """Mean, variance and central interval over samples ``[S, …]``."""
    ordered = values.sort(0).values
    ends = [_quantile(ordered, (1 + sign * interval) / 2) for sign in (-1, 1)]
    return values.mean(0), {"variance": values.var(0, correction=0), "lower": ends[0], "upper": ends[1]}


def _quantile(ordered: Tensor, level: float) -> Tensor:
    """A quantile of sorted samples ``[S, …]``, linear between them; `torch.quantile` refuses large tensors."""
    position = level * (len(ordered) - 1)
    below = int(position)
    return torch.lerp(ordered[below], ordered[min(below + 1, len(ordered) - 1)], position - below)


def _noise(mean: Tensor, variance: Tensor, of_forward: Columns) -> Columns:
    """The noise of the targets and its interval, where a result is the mean that ``forward`` states: the units agree."""
    if "aleatoric" not in of_forward or of_forward["mean"].numel() != mean.numel():
        return {}
    if not _are_close(mean, of_forward["mean"]) or not _are_close(variance, of_forward["epistemic"]):
        return {}
    return {name: of_forward[name].reshape(mean.shape) for name in ("aleatoric", "lower", "upper")}


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Whether values are the same in another shape, to rounding."""
    return one.numel() == other.numel() and torch.allclose(one.flatten(), other.flatten().to(one), rtol=1e-4, atol=1e-6)
