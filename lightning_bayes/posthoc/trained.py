"""Whether a network was trained: does it predict its training data better than a constant does?"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from lightning_bayes.curvature.likelihood import Bernoulli, Gaussian, Likelihood, Softmax
from lightning_bayes.errors import NonFiniteError, UnsupportedTrainingError
from lightning_bayes.posthoc.evidence import Fit


@final
class TrainingFit:
    """Adds up how a network and the best constant prediction fit the training data.

    Args:
        likelihood: The likelihood of the targets.
    """

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood
        self.nll = self.squares = 0.0
        self.targets = self.examples = 0
        self.total: Tensor | float = 0.0  # of targets: counts of classes, or their sum
        self.total_square = 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch.

        Args:
            outputs: The network's.
            targets: The targets of the same examples.
        """
        self.nll += float(self.likelihood.nll(outputs, targets).double().sum())
        self.targets += targets.numel()
        self.examples += len(outputs)
        if isinstance(self.likelihood, Softmax):
            self.total = self.total + _class_counts(outputs, targets)
            return
        targets = targets.to(outputs.dtype).double()
        self.total, self.total_square = self.total + targets.sum(0), self.total_square + float(targets.square().sum())
        self.squares += float((outputs.double() - targets).square().sum())

    @property
    def fit(self) -> Fit:
        """The network's fit."""
        squares = self.squares if isinstance(self.likelihood, Gaussian) else None
        return Fit(self.nll, squares, self.targets)

    def require_trained(self, model: str) -> None:
        """Require a network that predicts better than the best constant.

        Args:
            model: Its name.

        Raises:
            NonFiniteError: If its NLL is not finite.
            UnsupportedTrainingError: If it is not better.
        """
        if not torch.tensor(self.nll).isfinite():
            raise NonFiniteError(f"The NLL of {model} on the training data is {self.nll}; its outputs are broken.")
        own, constant, what = self._compared()
        if constant > 0 and own >= constant:
            raise UnsupportedTrainingError(
                f"{model} was not trained: its {what} on the training data is {own:.4g}, and that of a constant prediction "
                f"{constant:.4g}. Train it or load its weights first, or pass require_trained=False."
            )

    def _compared(self) -> tuple[float, float, str]:
        """The error of the network, that of the best constant, and its name; each per target."""
        if isinstance(self.likelihood, Gaussian):
            total = torch.as_tensor(self.total)
            rows = self.targets / max(1, total.numel())
            constant = self.total_square - float(total.square().sum()) / rows
            return self.squares / self.targets, constant / self.targets, "mean squared error"
        counts = torch.as_tensor(self.total).double()
        if isinstance(self.likelihood, Bernoulli):
            rows = self.targets / max(1, counts.numel())
            entropy = _entropy(torch.stack([counts, rows - counts]) / rows) * rows
        elif isinstance(self.likelihood, Softmax):
            entropy = _entropy(counts / counts.sum()) * self.targets
        else:
            return self.nll, 0.0, "NLL"
        return self.nll / self.targets, entropy / self.targets, "NLL"


def _class_counts(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return targets.double().flatten(2).sum((0, 2)) if targets.dim() > 2 else targets.double().sum(0)
    known = targets[targets >= 0]
    return torch.bincount(known.flatten(), minlength=outputs.shape[1]).double()


def _entropy(probs: Tensor) -> float:
    return float(torch.special.entr(probs).sum())
