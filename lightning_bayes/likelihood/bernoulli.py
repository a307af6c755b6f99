"""Independent binary labels, p(y = 1 | f) = sigmoid(f).

    combine    logit of the mean probability
    H          p (1 - p)
    loss       -(ω y log p + (1 - y) log(1 - p)),    ω the pos_weight:    its curvature is (1 + (ω - 1) y) H

H is the curvature of -log p(y | f) in f.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from typing_extensions import override

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood.base import OutputLikelihood, finite, one_output, require_same_shape
from lightning_bayes.likelihood.predictions import Prediction, entropy

_LEAST: Final = 1e-38  # probability whose logarithm is finite in single precision


@final
class Bernoulli(OutputLikelihood):
    """One label, 0 or 1, for each output; targets have the shape of the outputs.

    Args:
        pos_weight: ω, of each output or of all, as in `torch.nn.BCEWithLogitsLoss`; None for 1.
        is_logits: Whether outputs are logits, and not the probabilities themselves.
    """

    name: ClassVar[str] = "bernoulli"
    has_classes: ClassVar[bool] = True
    cases = ((lambda: Bernoulli(), (3,)),)

    def __init__(self, pos_weight: float | Sequence[float] | None = None, is_logits: bool = True) -> None:
        self.pos_weight, self.is_logits = pos_weight, is_logits

    @property
    def has_temperature(self) -> bool:
        """Logits have."""
        return self.is_logits

    @override
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        require_same_shape("Bernoulli", outputs, "logits", targets, "targets")
        labels = targets.to(outputs.dtype)
        if self.is_logits:
            return -F.binary_cross_entropy_with_logits(outputs, labels, reduction="none")
        one, zero = outputs.clamp_min(_LEAST).log(), (1 - outputs).clamp_min(_LEAST).log()
        return labels * one + (1 - labels) * zero

    def log_predictive(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """That of the mean probabilities, also against probabilities as targets."""
        return self.log_prob(self.combine(outputs), targets)

    def combine(self, outputs: Tensor) -> Tensor:
        """The logit of the mean probability, or the mean probability."""
        if not self.is_logits:
            return outputs.mean(0)
        return F.logsigmoid(outputs).logsumexp(0) - F.logsigmoid(-outputs).logsumexp(0)

    def probs(self, outputs: Tensor) -> Tensor:
        """Probabilities under each sample, in the shape of outputs ``[S, B, …]``."""
        return outputs.sigmoid() if self.is_logits else outputs

    def class_probs(self, outputs: Tensor) -> Tensor:
        """Probabilities of the labels 0 and 1."""
        probs = self.probs(outputs)
        return torch.stack([1 - probs, probs], -1)

    def summarise(self, outputs: Tensor, interval: float = 0.9) -> Prediction:
        """Mean probability, entropy and mutual information of each label."""
        samples = self.probs(outputs)
        mean = samples.mean(0)
        total, within = entropy(torch.stack([mean, 1 - mean], -1)), entropy(torch.stack([samples, 1 - samples], -1))
        return Prediction(mean, total, (total - within.mean(0)).clamp_min(0), samples)

    def sample(self, outputs: Tensor, generator: Generator) -> Tensor:
        """Draw a label, 0 or 1, for each output, in the shape and dtype of `outputs`."""
        return torch.bernoulli(self.probs(finite(outputs)), generator=generator)

    def root(self, outputs: Tensor, index: int) -> Tensor:
        """√(p (1 - p)) of one output."""
        if not self.is_logits:
            raise HyperparameterError(
                "The network returns the means of its targets, of which the loss takes the logarithm, but the curvature is "
                "that of logits. Return them from forward and train with F.binary_cross_entropy_with_logits."
            )
        probs = outputs.sigmoid()
        return one_output((probs * (1 - probs)).sqrt(), index)

    def weights(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """1 + (ω - 1) y of each target."""
        if self.pos_weight is None:
            return None
        return 1 + (outputs.new_tensor(self.pos_weight) - 1) * targets.to(outputs.dtype)

    def completed(self, recorded: OutputLikelihood) -> Bernoulli:
        """Take the weight from the training loss, where it is not stated."""
        if not isinstance(recorded, Bernoulli):
            return super().completed(recorded)
        weight = recorded.pos_weight if self.pos_weight is None else self.pos_weight
        return OutputLikelihood.completed(Bernoulli(weight, recorded.is_logits), recorded)
