"""Likelihoods p(y | f) with sampled labels, for the Fisher information matrix.

    F = (1/n) Σ_i E_{y ~ p(y | f_i)} [ g_i(y) g_i(y)ᵀ ],    g_i(y) = -∇_θ log p(y | f_i)

The expectation is over labels sampled from the model. With the labels of the data, the sum is the empirical Fisher, a
different matrix (Kunstner et al. 2019, https://arxiv.org/abs/1905.12558). One sampled label per example gives an unbiased
estimate of F: measure the ``"squared_gradients"`` of `Likelihood.sampled_loss`. For the likelihoods in this file, F equals
the generalised Gauss-Newton matrix. Sampling uses the caller's generator, never torch's global one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from lightning_bayes.errors import HyperparameterError, ShapeError


class Likelihood(ABC):
    """A distribution of targets given a model's outputs ``[batch, …]``."""

    @abstractmethod
    def sample(self, outputs: Tensor, generator: Generator) -> Tensor:
        """Draw one target for each example.

        Args:
            outputs: The model's outputs.
            generator: Source of randomness, on the device of `outputs`.

        Returns:
            Targets, without gradients.
        """

    @abstractmethod
    def _nll_of_each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """-log p of each target, ``[batch, …]``."""

    def root(self, outputs: Tensor, index: int) -> Tensor:
        """A column v of a square root of the output curvature: Σ_index v vᵀ = H_i = -E ∂² log p(y | f_i)/∂f².

        Args:
            outputs: The model's outputs, ``[batch, …]``. The result has the same shape.
            index: The column, from 0 to the number of outputs per example minus 1.

        Raises:
            HyperparameterError: If the likelihood does not define this method.
        """
        raise HyperparameterError(
            f"{type(self).__name__} does not define its curvature. Override its method root, or sample labels from it with "
            "curvature='fisher'."
        )

    @final
    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of each example, -log p(y_i | f_i), in nats.

        Args:
            outputs: The model's outputs.
            targets: Targets as `sample` draws them.

        Returns:
            One value per example, ``[batch]``: the sum over the example's targets.
        """
        nll = self._nll_of_each(outputs, targets)
        return nll.reshape(len(nll), -1).sum(1)

    @final
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over examples of `nll`, a scalar."""
        return self.nll(outputs, targets).mean()

    @final
    def sampled_loss(self, outputs: Tensor, generator: Generator) -> Tensor:
        """`loss` with targets sampled from the model.

        Args:
            outputs: The model's outputs, with their graph.
            generator: Source of randomness, on the device of `outputs`.

        Returns:
            A scalar whose mean per-example squared gradient is an unbiased estimate of the Fisher's diagonal.

        Example:
            >>> from lightning_bayes.curvature import Softmax, measure
            >>> model, x = torch.nn.Linear(1, 2, bias=False), torch.ones(4096, 1)
            >>> _ = torch.nn.init.zeros_(model.weight)
            >>> generator = torch.Generator().manual_seed(0)
            >>> measure(model, lambda: Softmax().sampled_loss(model(x), generator)).curvature["weight"]  # p (1 - p) = 1/4
            tensor([[0.2500],
                    [0.2500]])
        """
        return self.loss(outputs, self.sample(outputs.detach(), generator))


@final
class Softmax(Likelihood):
    """Classes y with p(y | f) ∝ exp f_y; outputs are logits ``[batch, classes, …]``, targets ``[batch, …]``."""

    def sample(self, outputs: Tensor, generator: Generator) -> Tensor:
        """Draw a class ``[batch, …]`` for each example and position of logits ``[batch, classes, …]``."""
        probs = _finite(self._checked(outputs)).softmax(1).movedim(1, -1)
        return torch.multinomial(probs.reshape(-1, probs.shape[-1]), 1, generator=generator).reshape(probs.shape[:-1])

    def root(self, outputs: Tensor, index: int) -> Tensor:
        """√p_c (e_c - p) at one position; the outer products sum to diag p - p pᵀ. See `Likelihood.root`."""
        grid = self._checked(outputs).softmax(1).reshape(*outputs.shape[:2], -1)  # [batch, classes, positions]
        label, position = divmod(index, grid.shape[2])
        column, probs = torch.zeros_like(grid), grid[:, :, position]
        column[:, :, position] = -probs * probs[:, label, None].sqrt()
        column[:, label, position] += probs[:, label].sqrt()
        return column.view_as(outputs)

    def _nll_of_each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self._checked(outputs), targets, reduction="none")

    @staticmethod
    def _checked(outputs: Tensor) -> Tensor:
        if outputs.dim() < 2 or outputs.shape[1] < 2:
            raise ShapeError(
                f"Softmax needs logits [batch, classes, …] of at least two classes, but got {list(outputs.shape)}. For one "
                "logit per label, use Bernoulli."
            )
        return outputs


@final
class Bernoulli(Likelihood):
    """Independent binary labels with p(y = 1 | f) = sigmoid(f); outputs are logits, targets have the same shape."""

    def sample(self, outputs: Tensor, generator: Generator) -> Tensor:
        """Draw a label, 0 or 1, for each logit, in the shape and dtype of `outputs`."""
        return torch.bernoulli(_finite(outputs).sigmoid(), generator=generator)

    def root(self, outputs: Tensor, index: int) -> Tensor:
        """√(p (1 - p)) of one output; see `Likelihood.root`."""
        probs = outputs.sigmoid()
        return _one_output((probs * (1 - probs)).sqrt(), index)

    def _nll_of_each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _require_same_shape("Bernoulli", outputs, "logits", targets, "targets")
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")


@final
class Poisson(Likelihood):
    """Independent counts with the rate exp f; outputs are log-rates, targets have the same shape."""

    def sample(self, outputs: Tensor, generator: Generator) -> Tensor:
        """Draw a count for each log-rate, in the shape and dtype of `outputs`."""
        return torch.poisson(_finite(outputs).exp(), generator=generator)

    def root(self, outputs: Tensor, index: int) -> Tensor:
        """√(exp f) of one output; see `Likelihood.root`."""
        return _one_output((outputs / 2).exp(), index)

    def _nll_of_each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _require_same_shape("Poisson", outputs, "log-rates", targets, "counts")
        counts = targets.to(outputs.dtype)
        return outputs.exp() - counts * outputs + torch.lgamma(counts + 1)


@final
class Gaussian(Likelihood):
    """Independent y ~ N(f, std²) with known noise; outputs are means, targets have the same shape.

    Args:
        std: Standard deviation of the noise, in the units of the targets.

    Raises:
        HyperparameterError: If `std` is not positive and finite.
    """

    def __init__(self, std: float) -> None:
        if not 0 < std < math.inf:
            raise HyperparameterError(f"std={std} must be a positive, finite standard deviation of the targets.")
        self.std = std

    def sample(self, outputs: Tensor, generator: Generator) -> Tensor:
        """Draw a target around each mean, in the shape and dtype of `outputs`."""
        noise = torch.randn(outputs.shape, generator=generator, device=outputs.device, dtype=outputs.dtype)
        return outputs.detach() + self.std * noise

    def root(self, outputs: Tensor, index: int) -> Tensor:
        """1/σ of one output; see `Likelihood.root`."""
        return _one_output(torch.full_like(outputs, 1 / self.std), index)

    def _nll_of_each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _require_same_shape("Gaussian", outputs, "means", targets, "targets")
        return ((targets - outputs) / self.std).square() / 2 + math.log(self.std) + math.log(2 * math.pi) / 2


def _one_output(values: Tensor, index: int) -> Tensor:
    """Keep `values` of one output per example, and set the other values to zero."""
    column = values.new_zeros(values.shape)  # contiguous, also where the values are transposed
    column.view(len(values), -1)[:, index] = values.reshape(len(values), -1)[:, index]
    return column


def _require_same_shape(name: str, outputs: Tensor, of_outputs: str, targets: Tensor, of_targets: str) -> None:
    if outputs.shape != targets.shape:
        raise ShapeError(
            f"{name} got {of_outputs} {list(outputs.shape)} and {of_targets} {list(targets.shape)}. Reshape one of them to "
            "the shape of the other."
        )


def _finite(logits: Tensor) -> Tensor:
    """Replace NaN, which torch cannot sample from. The loss is not finite then, so the update is skipped anyway."""
    return logits.detach().nan_to_num()
