"""A network's fit to its training data. A trained network predicts them better than a constant does."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from lightning_bayes.curvature.likelihood import Bernoulli, Gaussian, Likelihood, Softmax
from lightning_bayes.errors import NonFiniteError, UnsupportedTrainingError
from lightning_bayes.predictive import entropy


@final
class TrainingFit:
    """Sums the errors of a network and of the best constant prediction on the training data."""

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood
        self.nll = 0.0  # -Σ log p(y_i | f_i) in nats
        self.squares = 0.0  # Σ (y - f)², except for classes
        self.targets = self.examples = 0  # their numbers
        self.total: Tensor | float = 0.0  # sum of the targets, or class counts
        self.total_square = 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch of outputs and targets."""
        self.nll += float(self.likelihood.nll(outputs, targets).double().sum())
        self.targets += targets.numel()
        self.examples += len(outputs)
        if isinstance(self.likelihood, Softmax):
            self.total = self.total + _class_counts(outputs, targets)
            return
        targets = targets.to(outputs.dtype).double()
        self.total, self.total_square = self.total + targets.sum(0), self.total_square + float(targets.square().sum())
        self.squares += float((outputs.double() - targets).square().sum())

    def require_trained(self, model: str) -> None:
        """Raise an error unless the network, with name `model`, predicts better than the best constant."""
        if not math.isfinite(self.nll):
            raise NonFiniteError(f"The NLL of {model} on the training data is {self.nll}. Its outputs are not finite.")
        error, constant_error, measure = self._errors()
        if constant_error > 0 and error >= constant_error:
            raise UnsupportedTrainingError(
                f"{model} was not trained: its {measure} on the training data is {error:.4g}, compared with "
                f"{constant_error:.4g} for a constant prediction. Train it or load its weights first, or pass "
                "require_trained=False."
            )

    def _errors(self) -> tuple[float, float, str]:
        """Errors per target of the network and of the best constant (0 if unknown), and the name of the error."""
        total = torch.as_tensor(self.total).double()
        rows = self.targets / max(1, total.numel())
        if isinstance(self.likelihood, Gaussian):
            constant_squares = self.total_square - float(total.square().sum()) / rows
            return self.squares / self.targets, constant_squares / self.targets, "mean squared error"
        if isinstance(self.likelihood, Bernoulli):
            constant_nll = float(entropy(torch.stack([total, rows - total]) / rows, 0).sum()) * rows
        elif isinstance(self.likelihood, Softmax):
            constant_nll = float(entropy(total / total.sum())) * self.targets
        else:
            constant_nll = 0.0
        return self.nll / self.targets, constant_nll / self.targets, "NLL"


def _class_counts(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return targets.double().flatten(2).sum((0, 2)) if targets.dim() > 2 else targets.double().sum(0)
    labelled = targets[targets >= 0]  # negative indices mark ignored targets
    return torch.bincount(labelled, minlength=outputs.shape[1]).double()
