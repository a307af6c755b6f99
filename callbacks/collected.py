"""Predictions of a test, collected over batches and gathered from all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bayes.callbacks.step_outputs import StepOutputs
from lightning_bayes.predictive import combine, ood_scores

Gather = Callable[[Tensor], Tensor]  # concatenates the tensors of all processes along the first dimension


class Predicted(NamedTuple):
    """Predictions of a whole test."""

    probs: dict[str, Tensor]  # probabilities of the test set by kind of prediction, [examples, classes]
    targets: Tensor  # targets of the test set, [examples]
    scores: dict[str, dict[str, Tensor]]  # out-of-distribution scores by name of the score and of the set, [inputs]


class CollectedPredictions:
    """Collects probabilities of the test set, and out-of-distribution scores of the test set and of other sets."""

    def __init__(self) -> None:
        self._probs: dict[str, list[Tensor]] = {}
        self._targets: list[Tensor] = []
        self._scores: dict[str, dict[str, list[Tensor]]] = {}

    def add(self, step: StepOutputs, set_name: str, mean_outputs: Tensor | None) -> None:
        """Add a batch."""
        probs = combine(step.outputs, "softmax").exp()
        if set_name == "test":
            kinds = {"prediction" if mean_outputs is None else "Monte Carlo": probs}
            if mean_outputs is not None:
                kinds["mean"] = mean_outputs.detach().cpu().float().softmax(-1)
            for kind, values in kinds.items():
                self._probs.setdefault(kind, []).append(values)
            self._targets.append(step.targets)
        if set_name == "test" or set_name.startswith("ood/"):
            outputs = step.outputs if len(step.outputs) > 1 else step.outputs[0]
            for score, values in ood_scores(outputs).items():
                self._scores.setdefault(score, {}).setdefault(set_name.removeprefix("ood/"), []).append(values)

    def gathered(self, gather: Gather) -> Predicted | None:
        """The predictions of all processes; None without a batch of the test set."""
        if not self._targets:
            return None
        probs = {kind: gather(torch.cat(batches)) for kind, batches in self._probs.items()}
        scores = {
            score: {name: gather(torch.cat(batches)) for name, batches in sets.items()}
            for score, sets in self._scores.items()
        }
        return Predicted(probs, gather(torch.cat(self._targets)), scores)
