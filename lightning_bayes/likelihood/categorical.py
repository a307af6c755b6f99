"""Classes, p(y | f) ∝ exp f_y. Probabilities are averaged over samples, never logits.

    combine    log (1/S) Σ_s softmax(f_s): its softmax is the mean probability, so cross-entropy scores the average
    H          diag p - p pᵀ,    root √p_c (e_c - p)
    loss       Σ_c w_c q_c (-log p_c),    q = (1 - ε) e_y + ε/C:    its curvature is (Σ_c w_c q_c) H

H is the curvature of -log p(y | f) in f.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Final, final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.likelihood.base import OutputLikelihood, finite
from lightning_bayes.likelihood.predictions import Prediction, entropy, mutual_information

_LEAST: Final = 1e-38  # probability whose logarithm is finite in single precision


@final
class Categorical(OutputLikelihood):
    """One class per example and position; outputs are logits with the classes in one dimension.

    Targets are class indices, ``[B, …]`` without the dimension of the classes, or probabilities in the shape of the outputs.

    Args:
        dim: Dimension of the classes in ``[B, …]``: 1 for ``[B, C]`` and ``[B, C, H, W]``, -1 for tokens ``[B, T, C]``.
            None is 1 until a training loss tells another.
        weight: Weights w of the classes in the loss; None for 1.
        label_smoothing: ε of the loss.
        is_weighted_mean: Whether the loss divides by the sum of its targets' weights, as `F.cross_entropy` does with class
            indices and ``reduction="mean"``. The weights then have the mean 1, so a common factor of them says nothing.
        is_logits: Whether outputs are logits or log-probabilities, and not the probabilities themselves.

    Raises:
        HyperparameterError: If a setting is out of range.
    """

    name: ClassVar[str] = "categorical"
    has_classes: ClassVar[bool] = True
    cases = ((lambda: Categorical(), (3,)), (lambda: Categorical(), (3, 2, 2)), (lambda: Categorical(-1), (2, 3)))

    def __init__(
        self,
        dim: int | None = None,
        weight: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
        is_logits: bool = True,
        is_weighted_mean: bool = True,
    ) -> None:
        if dim == 0 or not 0 <= label_smoothing < 1 or (weight is not None and min(weight) < 0):
            raise HyperparameterError(
                f"Categorical(dim={dim}, weight={weight}, label_smoothing={label_smoothing}): dim=0 holds the examples; "
                "weights must not be negative, and label_smoothing must lie between 0 and 1."
            )
        self.dim, self.label_smoothing, self.is_logits = dim, label_smoothing, is_logits
        self.is_weighted_mean = is_weighted_mean
        self.weight = None if weight is None else [float(value) for value in weight]

    @property
    def has_temperature(self) -> bool:
        """Logits have."""
        return self.is_logits

    @property
    def classes(self) -> int:
        """The dimension of the classes in one output ``[B, …]``."""
        return 1 if self.dim is None else self.dim

    @property
    def sampled_classes(self) -> int:
        """The dimension of the classes in outputs ``[S, B, …]``."""
        return self.classes if self.classes < 0 else self.classes + 1

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Probabilities as targets give their cross-entropy."""
        return -F.cross_entropy(*self._for_torch(outputs, targets), reduction="none")

    def log_predictive(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """That of the mean probabilities, also against probabilities as targets."""
        return self.log_prob(self.combine(outputs), targets)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy with the weights and the smoothing."""
        weight = None if self.weight is None else outputs.new_tensor(self.weight)
        given = self._for_torch(outputs, targets)
        return F.cross_entropy(*given, weight, reduction="none", label_smoothing=self.label_smoothing)

    def divisor(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """The weight of each target's class, if the loss is a weighted mean."""
        if self.weight is None or not self.is_weighted_mean or targets.is_floating_point():
            return None
        return outputs.new_tensor(self.weight)[targets.long()]

    def over_outputs(self, values: Tensor, outputs: Tensor) -> Tensor:
        """The same value for all classes."""
        return values.unsqueeze(self.classes).expand(outputs.shape)

    def combine(self, outputs: Tensor) -> Tensor:
        """The log of the mean probability, or the mean probability."""
        outputs = self._checked(outputs)
        if not self.is_logits:
            return outputs.mean(0)
        return outputs.log_softmax(self.sampled_classes).logsumexp(0) - math.log(len(outputs))

    def probs(self, outputs: Tensor) -> Tensor:
        """Probabilities under each sample, in the shape of outputs ``[S, B, …]``."""
        return outputs.softmax(self.sampled_classes) if self.is_logits else outputs

    def class_probs(self, outputs: Tensor) -> Tensor:
        """Probabilities with the classes in the last dimension."""
        return self.probs(self._checked(outputs)).movedim(self.sampled_classes, -1)

    def summarise(self, outputs: Tensor, interval: float = 0.9) -> Prediction:
        """Mean probabilities, their entropy and the mutual information."""
        samples = self.probs(self._checked(outputs))
        mean, dim = samples.mean(0), self.classes
        return Prediction(mean, entropy(mean, dim), mutual_information(samples, self.sampled_classes), samples)

    def sample(self, outputs: Tensor, generator: Generator) -> Tensor:
        """Draw a class for each example and position."""
        probs = self._logits(finite(self._checked(outputs, 1))).softmax(self.classes).movedim(self.classes, -1)
        return torch.multinomial(probs.reshape(-1, probs.shape[-1]), 1, generator=generator).reshape(probs.shape[:-1])

    def root(self, outputs: Tensor, index: int) -> Tensor:
        """√p_c (e_c - p) at one position; the outer products sum to diag p - p pᵀ."""
        if not self.is_logits:
            raise HyperparameterError(
                "The network returns the means of its targets, of which the loss takes the logarithm, but the curvature is "
                "that of logits. Return them from forward and train with F.cross_entropy."
            )
        probs = self._checked(outputs, 1).softmax(self.classes).movedim(self.classes, 1)
        grid = probs.reshape(*probs.shape[:2], -1)  # [batch, classes, positions]
        label, position = divmod(index, grid.shape[2])
        column, here = torch.zeros_like(grid), grid[:, :, position]
        column[:, :, position] = -here * here[:, label, None].sqrt()
        column[:, label, position] += here[:, label].sqrt()
        return column.view(probs.shape).movedim(1, self.classes)

    def weights(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Σ_c w_c q_c of each target, ``[B, …]``; 1 without weights, unless the targets do not sum to 1."""
        is_soft = targets.is_floating_point()
        if self.weight is None and not is_soft:
            return None
        classes = outputs.shape[self.classes]
        weight = outputs.new_tensor([1.0] * classes if self.weight is None else self.weight)
        if is_soft:
            of_targets = (targets.to(weight.dtype).movedim(self.classes, -1) * weight).sum(-1)
        else:
            of_targets = weight[targets.long()]
        return (1 - self.label_smoothing) * of_targets + self.label_smoothing * weight.mean()

    def target_shape(self, outputs: Tensor, targets: Tensor) -> tuple[int, ...]:
        """Without the classes for indices, with them for probabilities."""
        shape = list(outputs.shape)
        if not targets.is_floating_point():
            del shape[self.classes]
        return tuple(shape) if math.prod(shape) == targets.numel() else tuple(targets.shape)

    def completed(self, recorded: OutputLikelihood) -> Categorical:
        """Take the dimension and the weights from the training loss, where they are not stated."""
        if not isinstance(recorded, Categorical):
            return super().completed(recorded)
        found = Categorical(
            recorded.dim if self.dim is None else self.dim,
            recorded.weight if self.weight is None else self.weight,
            self.label_smoothing or recorded.label_smoothing,
            recorded.is_logits,
            recorded.is_weighted_mean,
        )
        return OutputLikelihood.completed(found, recorded)

    def is_refined_by(self, stated: OutputLikelihood) -> bool:
        """A class dimension that the loss does not tell may be stated."""
        if not isinstance(stated, Categorical):
            return False
        return {**self.state(), "dim": None} == {**stated.state(), "dim": None} and self.dim in {None, stated.dim}

    def _for_torch(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits with the classes in dimension 1, and targets as torch takes them."""
        values = self._logits(self._checked(outputs, 1)).movedim(self.classes, 1)
        if targets.is_floating_point():
            is_beside = targets.shape == outputs.shape
            return values, (targets.movedim(self.classes, 1) if is_beside else targets).to(values.dtype)
        return values, targets.long()

    def _logits(self, outputs: Tensor) -> Tensor:
        return outputs if self.is_logits else outputs.clamp_min(_LEAST).log()

    def _checked(self, outputs: Tensor, leading: int = 2) -> Tensor:
        """Require at least two classes after `leading` dimensions: of the batch, or of samples and batch."""
        dim = self.classes if leading == 1 else self.sampled_classes
        if outputs.dim() <= leading or not -outputs.dim() <= dim < outputs.dim() or outputs.shape[dim] < 2:
            shape = "samples, batch" if leading == 2 else "batch"
            expected = f"[{shape}, classes, …]" if self.classes == 1 else f"[{shape}, …, classes]"
            raise ShapeError(
                f"{self!r} needs logits of shape {expected} with at least two classes, got {list(outputs.shape)}. For "
                "one logit per label, use link='binary'; for values, link='regression'."
            )
        return outputs
