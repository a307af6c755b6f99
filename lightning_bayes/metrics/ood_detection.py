"""One metric for the detection of several OOD sets by several scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from lightning_bayes.errors import HyperparameterError, NonFiniteError, ShapeError
from lightning_bayes.metrics.detection import ood_aupr, ood_auroc, ood_fpr95
from lightning_bayes.metrics.states import StoredMetric

_MEASURES = {"AUROC": ood_auroc, "AUPR": ood_aupr, "FPR95": ood_fpr95}


@final
class OODDetection(StoredMetric):
    """AUROC, AUPR and FPR95 of every score on every set; OOD is the positive class (see `ood_auroc`).

    ``compute`` returns ``{set}/{score}/{measure}`` for each score and each set against the test set. For the first score it
    also returns ``{measure}`` for all sets together and, if there are several sets, ``{set}/{measure}`` for each set.

    Args:
        sets: Names of the OOD sets, at least one.
        scores: Names of the scores, at least one.
        prefix: Prefix of every key, including the slash.
        **kwargs: Passed to `torchmetrics.Metric`.

    Raises:
        HyperparameterError: If there are no sets or no scores, or a name occurs twice.
    """

    # Scores are [batch, scores], flattened because the state of a process without data has one dimension. The set index is
    # 0 for the test set.
    columns = ("scores", "set_index")

    def __init__(self, sets: Sequence[str], scores: Sequence[str], prefix: str = "ood/", **kwargs: Any) -> None:
        for argument, names in (("sets", sets), ("scores", scores)):
            if not names or len(set(names)) < len(names):
                raise HyperparameterError(f"{argument}={list(names)} must contain at least one name, each once.")
        super().__init__(**kwargs)
        self.sets, self.score_names, self.prefix = tuple(sets), tuple(scores), prefix

    def update(self, scores: Mapping[str, Tensor], set_index: int) -> None:
        """Add a batch: every score by name, ``[batch]`` each, of set 0 (the test set), 1 (the first OOD set) and so on."""
        sizes = {len(value) if value.ndim == 1 else None for value in scores.values()}
        if set(scores) != set(self.score_names) or len(sizes) > 1 or None in sizes:
            shapes = {name: list(value.shape) for name, value in scores.items()}
            raise ShapeError(f"Expected the scores {list(self.score_names)}, [batch] each, got {shapes}.")
        columns = torch.stack([scores[name].detach() for name in self.score_names], -1)
        if bool(columns.isnan().any()):
            raise NonFiniteError(f"{int(columns.isnan().any(-1).sum())} of {len(columns)} inputs have a score of nan.")
        self.store(columns.flatten(), torch.full((len(columns),), set_index, device=columns.device))

    def measure(self, scores: Tensor, set_index: Tensor) -> dict[str, Tensor]:
        """Return all values by key; ``nan`` if either kind of input is missing."""
        values = self._values(scores.view(-1, len(self.score_names)), set_index)
        return {self.prefix + key: value for key, value in values}

    def _values(self, columns: Tensor, index: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield from _measured("", columns[:, 0], index > 0)
        for position, name in enumerate(self.sets, start=1):
            either = (index == 0) | (index == position)
            if len(self.sets) > 1:
                yield from _measured(f"{name}/", columns[either, 0], index[either] > 0)
            for column, score in enumerate(self.score_names):
                yield from _measured(f"{name}/{score}/", columns[either, column], index[either] > 0)


def _measured(prefix: str, scores: Tensor, is_ood: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, measure in _MEASURES.items():
        yield prefix + name, measure(scores, is_ood)
