"""A network's fit to its training data. A trained network predicts them better than a constant does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, final

import torch
from torch import Tensor

from lightning_bayes.errors import DataError, NonFiniteError, UnsupportedTrainingError
from lightning_bayes.likelihood import Bernoulli, Categorical, Gaussian, OutputLikelihood, PredictedGaussian, Raw
from lightning_bayes.likelihood.predicted_gaussian import split
from lightning_bayes.likelihood.predictions import entropy
from lightning_bayes.posthoc.batches import Term

_MOST_NOISES: Final = 64  # outputs of an example that get a σ each
_LEAST_RATIO: Final = 1e-6  # of mean squared residuals, for outputs that are fitted exactly


@final
class TrainingFit:
    """Sums the errors of a network and of the best constant prediction on the training data, over targets that count."""

    def __init__(self, kind: OutputLikelihood) -> None:
        self.kind = kind
        self.loss = 0.0  # Σ ℓ with the weights of the loss
        self.nll = 0.0  # -Σ log p(y_i | f_i) in nats
        self.count = self.divisor = 0.0  # number of targets, and the sum of what a mean loss divides by
        self.examples = 0
        self.standardised = self.log_noise = 0.0  # Σ ((y - f)/σ₁)² and Σ log σ₁ + ½ log 2π of a regression
        self._squares: Tensor | float = 0.0  # Σ (y - f)² of each output
        self._counts: Tensor | float = 0.0  # of each output
        self._total: Tensor | float = 0.0  # Σ y of each output, or of each class
        self._total_square: Tensor | float = 0.0

    def update(self, term: Term) -> None:
        """Add a batch."""
        mask = term.mask
        self.nll, self.loss = self.nll + float(term.nll), self.loss + float(term.loss)
        divisor = self.kind.divisor(term.outputs, term.targets)
        count = float(mask.sum())
        if isinstance(self.kind, Gaussian):
            self._add_noise(term)
        self.count += count
        self.divisor += count if divisor is None else float(divisor.where(mask, 0.0).sum())
        self.examples += len(term.outputs)
        if isinstance(self.kind, Categorical):
            self._total = self._total + _class_counts(self.kind, term)
            return
        mean = split(term.outputs)[0] if isinstance(self.kind, PredictedGaussian) else term.outputs
        if mean.shape != mask.shape:
            return
        targets = term.targets.reshape(mean.shape).double().where(mask, 0.0)
        squares = (mean.detach().double() - targets).square().where(mask, 0.0)
        self._counts, self._squares = self._counts + _of_outputs(mask), self._squares + _of_outputs(squares)
        self._total = self._total + _of_outputs(targets)
        self._total_square = self._total_square + _of_outputs(targets.square())

    def _add_noise(self, term: Term) -> None:
        """Split the loss at σ = 1 into the part that 1/σ² multiplies and the rest."""
        std = term.outputs.new_tensor(self.kind.std).double().expand(term.outputs.shape)  # type: ignore[attr-defined]
        factors = term.factors.double()
        residuals = ((term.targets - term.outputs.detach()) / std).where(term.mask, 0.0)
        self.standardised += float((residuals.square() * factors).sum())
        self.log_noise += float(((std.log() + math.log(2 * math.pi) / 2) * factors).sum())

    @property
    def scale(self) -> float:
        """What a weighted mean multiplies each loss by, so that the losses of all targets weigh as much as these."""
        if self.count == 0:
            raise DataError("No target of the training data counts: all are ignored or missing.")
        return self.count / self.divisor

    def noise_std(self) -> Tensor:
        """The root mean square residual of each output, or of all where there are many outputs or few data."""
        squares, counts = torch.as_tensor(self._squares), torch.as_tensor(self._counts)
        if not 1 < squares.numel() <= _MOST_NOISES or bool((counts < 2).any()):
            return (squares.sum() / counts.sum()).sqrt()
        mean_squares = squares / counts
        return mean_squares.clamp_min(_LEAST_RATIO * mean_squares.amax()).sqrt()

    def require_trained(self, model: str) -> None:
        """Raise an error unless the network, with name `model`, predicts better than the best constant."""
        if not math.isfinite(self.nll):
            raise NonFiniteError(f"The NLL of {model} on the training data is {self.nll}. Its outputs are not finite.")
        error, constant_error, measure = self._errors()
        if constant_error > 0 and error >= constant_error:
            raise UnsupportedTrainingError(
                f"{model} was not trained: its {measure} on the training data is {error:.4g}, compared with "
                f"{constant_error:.4g} for a constant prediction. Train it or load its weights first; "
                "laplace(..., require_trained=False) takes it as it is."
            )

    def _errors(self) -> tuple[float, float, str]:
        """Errors per target of the network and of the best constant (0 if unknown), and the name of the error."""
        total, counts = torch.as_tensor(self._total).double(), torch.as_tensor(self._counts).double()
        if isinstance(self.kind, (Gaussian, PredictedGaussian)):
            constant_squares = torch.as_tensor(self._total_square) - total.square() / counts.clamp_min(1)
            squares = torch.as_tensor(self._squares)
            return float(squares.sum()) / self.count, float(constant_squares.sum()) / self.count, "mean squared error"
        constant_nll = 0.0
        if isinstance(self.kind, Bernoulli):
            share = total / counts.clamp_min(1)
            constant_nll = float((entropy(torch.stack([share, 1 - share]), 0) * counts).sum())
        elif isinstance(self.kind, Categorical):
            constant_nll = float(entropy(total / total.sum())) * self.count
        return self.nll / self.count, constant_nll / self.count, "NLL"


def together(fits: Sequence[TrainingFit]) -> TrainingFit:
    """The fit of all terms of a loss, whose targets are independent given the outputs."""
    if len(fits) == 1:
        return fits[0]
    weighted = [repr(fit.kind) for fit in fits if not math.isclose(fit.scale, 1.0, rel_tol=1e-9)]
    if weighted:
        raise UnsupportedTrainingError(
            f"The loss scores {len(fits)} outputs, and {', '.join(weighted)} divides by the sum of its weights, so that the "
            "terms have scales of their own. Laplace does not support this. Use a sum in place of the weighted mean."
        )
    total = TrainingFit(Raw())
    total.examples = fits[0].examples
    total.loss, total.count = sum(fit.loss for fit in fits), sum(fit.count for fit in fits)
    total.divisor = total.count
    return total


def _of_outputs(values: Tensor) -> Tensor:
    """Sums for each output: each column of ``[B, K]`` and ``[B, T, K]``, whose T may vary; one sum for more dimensions."""
    return values.flatten(0, -2).sum(0) if values.dim() in {2, 3} else values.sum()


def _class_counts(kind: Categorical, term: Term) -> Tensor:
    """The number of targets of each class, or the sum of their probabilities."""
    if term.targets.is_floating_point():
        probs = term.targets.double().movedim(kind.classes, -1)
        return probs[term.mask].sum(0)
    return torch.bincount(term.targets[term.mask].long(), minlength=term.outputs.shape[kind.classes]).double()
