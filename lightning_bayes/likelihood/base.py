"""The distribution of the targets given one output of a network: one file for each kind.

    p(y | x) ≈ (1/S) Σ_s p(y | f(x, θ_s))        H_i = -E_{y ~ p(y | f_i)} ∂² log p(y | f_i)/∂f²

Outputs are ``[B, …]``; outputs under S samples are ``[S, B, …]``. A kind that takes several outputs of ``forward``, such as
a mean and a variance, gets a tuple of them.

A loss may weight its terms, w_i ℓ_i, by the class of the target or by its label. `weights` are these factors; they are no
part of `log_prob`, which is that of the targets.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, ClassVar, TypeAlias, TypeVar, final

import torch
from torch import Generator, Tensor

from lightning_bayes.errors import HyperparameterError, PosteriorError, ShapeError
from lightning_bayes.likelihood.paths import mapped
from lightning_bayes.likelihood.predictions import AnyPrediction, moments_of

T = TypeVar("T", bound="OutputLikelihood")
Case: TypeAlias = tuple[Callable[[], "OutputLikelihood"], tuple[int, ...]]


class OutputLikelihood(ABC):
    """What a loss says about an output of ``forward``. A subclass defines `log_prob`, and what else it supports.

    Attributes:
        name: The kind's name in files, such as ``"categorical"``; a subclass that sets it is registered.
        has_classes: Whether targets are classes, with `class_probs`.
        cases: For the contract tests: functions that build a kind, each with the shape of one example's output, which is
            drawn from a standard normal distribution.
    """

    name: ClassVar[str] = "own"
    has_classes: ClassVar[bool] = False
    cases: ClassVar[Sequence[Case]] = ()

    @property
    def has_temperature(self) -> bool:
        """Whether dividing the output by a temperature gives a distribution of the same kind."""
        return False

    @property
    def has_noise(self) -> bool:
        """Whether outputs determine the distribution of real-valued targets, so that `summarise` returns `Observed`."""
        return False

    @abstractmethod
    def log_prob(self, outputs: Any, targets: Tensor) -> Tensor:
        """Log p(y | f) of each target, in nats.

        Args:
            outputs: One output, ``[B, …]``.
            targets: Targets of the same examples, ``[B, …]``.

        Returns:
            One value per target, ``[B, …]``. Weights of classes and examples are not part of it.
        """

    def log_predictive(self, outputs: Any, targets: Tensor) -> Tensor:
        """Log (1/S) Σ_s p(y | f_s) of each target, ``[B, …]`` in nats, from outputs ``[S, B, …]``."""
        return self.log_densities(outputs, targets).logsumexp(0) - math.log(num_samples(outputs))

    @final
    def log_densities(self, outputs: Any, targets: Tensor) -> Tensor:
        """Log p(y | f_s) of each target under each sample, ``[S, B, …]``."""
        samples = num_samples(outputs)
        repeated = targets.expand(samples, *targets.shape).flatten(0, 1)
        return torch.unflatten(self.log_prob(flattened(outputs), repeated), 0, (samples, -1))

    def mean(self, outputs: Any) -> Tensor:
        """The mean of the targets given outputs ``[B, …]``; by default the outputs."""
        return self.joined(outputs)

    def class_probs(self, outputs: Tensor) -> Tensor:
        """Probabilities under each sample with the classes last, ``[S, B, …, classes]``, for kinds with classes."""
        raise HyperparameterError(f"{self!r} has no classes.")

    def combine(self, outputs: Any) -> Any:
        """One output ``[B, …]`` that represents the average over samples of ``[S, B, …]``; by default their mean."""
        return mapped(lambda leaf: leaf.mean(0), outputs)

    def summarise(self, outputs: Any, interval: float = 0.9) -> AnyPrediction:
        """The prediction from outputs ``[S, B, …]``; by default mean and variance of the outputs.

        Args:
            outputs: Outputs under each sample.
            interval: Probability of the central interval of targets with known noise.

        Returns:
            `Prediction` for classes, `Observed` for values with known noise, else `Moments`.
        """
        return moments_of(outputs)

    def sample(self, outputs: Any, generator: Generator) -> Tensor:
        """Draw one target for each position of outputs ``[B, …]`` with a generator on their device, not the global one."""
        raise HyperparameterError(
            f"{type(self).__name__} cannot draw targets. Use curvature='ggn' or 'empirical_fisher'."
        )

    def root(self, outputs: Tensor, index: int) -> Tensor:
        """A column v of a square root of the output curvature, in the shape of `outputs`: Σ_index v vᵀ = H_i.

        Args:
            outputs: One output, ``[B, …]``.
            index: The column, from 0 to the number of outputs per example minus 1.

        Raises:
            HyperparameterError: If the kind does not define this method.
        """
        raise HyperparameterError(
            f"{type(self).__name__} does not define its curvature. Override its method root, or draw targets from it with "
            "curvature='fisher'."
        )

    def weights(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """The factor by which the loss multiplies each target's curvature; None for 1."""
        return None

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each target, -log p with the loss's weights and smoothing: `weights` are of its curvature."""
        log_prob, weights = self.log_prob(outputs, targets), self.weights(outputs, targets)
        return -log_prob if weights is None else -weights * log_prob

    def divisor(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """The weights by whose sum a mean loss divides, one for each target; None if it divides by their number."""
        return None

    def joined(self, outputs: Any) -> Tensor:
        """The outputs that this kind takes, as one tensor that it takes as well."""
        if not isinstance(outputs, Tensor):
            raise ShapeError(f"{self!r} takes one tensor, got a {type(outputs).__name__}.")
        return outputs

    def over_outputs(self, values: Tensor, outputs: Tensor) -> Tensor:
        """Values of each target, in the shape of `log_prob`, for each number of the outputs ``[B, …]``."""
        return values.reshape(outputs.shape)

    def completed(self: T, recorded: OutputLikelihood) -> T:
        """This stated kind with what a training loss adds to it; a contradiction is an error that shows both."""
        if recorded.is_refined_by(self):
            return self
        raise HyperparameterError(
            f"The stated likelihood {self!r} contradicts that of the training loss, {recorded!r}. Leave out link=... to "
            "use the loss's, or state the likelihood with which the network was trained."
        )

    def is_refined_by(self, stated: OutputLikelihood) -> bool:
        """Whether a stated kind says the same as this recorded one, or more."""
        return type(stated) is type(self) and stated.state() == self.state()

    def target_shape(self, outputs: Any, targets: Tensor) -> tuple[int, ...]:
        """The layout of targets beside outputs ``[B, …]``: by default that of the outputs, if the sizes agree."""
        return tuple(outputs.shape if outputs.numel() == targets.numel() else targets.shape)

    def state(self) -> dict[str, Any]:
        """The kind and its settings as plain values, for a file; only the name of a kind that is not of this package."""
        if KINDS.get(self.name) is type(self):
            return {"kind": self.name, **vars(self)}
        return {"kind": "raw", "why": f"the file was written with {type(self).__name__}, which it does not hold"}

    @staticmethod
    def of_state(state: Mapping[str, Any]) -> OutputLikelihood:
        """The kind of `state`, built with its settings as keyword arguments; raises `PosteriorError` if it is unknown."""
        settings = dict(state)
        kind = settings.pop("kind")
        if kind not in KINDS:
            raise PosteriorError(f"The kind of likelihood {kind!r} is unknown. Upgrade lightning-bayes.")
        return KINDS[kind](**settings)

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Register a kind by its name."""
        super().__init_subclass__(**arguments)
        if "name" in vars(cls):
            KINDS[cls.name] = cls

    def __repr__(self) -> str:
        """The constructor's call with the settings that are not its defaults."""
        defaults = {name: each.default for name, each in signature(type(self)).parameters.items()}
        settings = (f"{name}={value!r}" for name, value in vars(self).items() if value != defaults.get(name))
        return f"{type(self).__name__}({', '.join(settings)})"

    @final
    def nll(self, outputs: Any, targets: Tensor) -> Tensor:
        """Negative log-likelihood of each example, ``[B]`` in nats: the sum over the example's targets."""
        log_prob = self.log_prob(outputs, targets)
        return -log_prob.reshape(len(log_prob), -1).sum(1)

    @final
    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Mean over examples of `nll`, a scalar."""
        return self.nll(outputs, targets).mean()

    @final
    def sampled_loss(self, outputs: Tensor, generator: Generator) -> Tensor:
        """`loss` with targets sampled from the model, for the Fisher information matrix.

            F = (1/n) Σ_i E_{y ~ p(y | f_i)} [ g_i(y) g_i(y)ᵀ ],    g_i(y) = -∇_θ log p(y | f_i)

        With the labels of the data, the sum is the empirical Fisher, a different matrix (Kunstner et al. 2019,
        https://arxiv.org/abs/1905.12558).

        Args:
            outputs: The model's outputs, with their graph.
            generator: Source of randomness, on the device of `outputs`.

        Returns:
            A scalar whose mean per-example squared gradient is an unbiased estimate of the Fisher's diagonal.

        Example:
            >>> import torch
            >>> from lightning_bayes.curvature import measure
            >>> from lightning_bayes.likelihood import Categorical
            >>> model, x = torch.nn.Linear(1, 2, bias=False), torch.ones(4096, 1)
            >>> _ = torch.nn.init.zeros_(model.weight)
            >>> generator = torch.Generator().manual_seed(0)
            >>> loss = lambda: Categorical().sampled_loss(model(x), generator)
            >>> measure(model, loss).curvature["weight"]  # p (1 - p) = 1/4
            tensor([[0.2500],
                    [0.2500]])
        """
        return self.loss(outputs, self.sample(mapped(Tensor.detach, outputs), generator))


KINDS: dict[str, type[OutputLikelihood]] = {}  # by name


def flattened(outputs: Any) -> Any:
    """Outputs ``[S, B, …]`` as ``[S · B, …]``."""
    return mapped(lambda leaf: leaf.flatten(0, 1), outputs)


def num_samples(outputs: Any) -> int:
    """S of outputs ``[S, B, …]``."""
    while not isinstance(outputs, Tensor):
        outputs = next(iter(outputs.values() if isinstance(outputs, dict) else outputs))
    return len(outputs)


def one_output(values: Tensor, index: int) -> Tensor:
    """Keep `values` of one output per example, and set the other values to zero."""
    column = values.new_zeros(values.shape)  # contiguous, also where the values are transposed
    column.view(len(values), -1)[:, index] = values.reshape(len(values), -1)[:, index]
    return column


def require_same_shape(name: str, outputs: Tensor, of_outputs: str, targets: Tensor, of_targets: str) -> None:
    """Raise a `ShapeError` unless each output has one target."""
    if outputs.shape != targets.shape:
        raise ShapeError(
            f"{name} got {of_outputs} {list(outputs.shape)} and {of_targets} {list(targets.shape)}. Reshape one of them to "
            "the shape of the other."
        )


def finite(logits: Tensor) -> Tensor:
    """Replace NaN, which torch cannot sample from. The loss is not finite then, so the update is skipped anyway."""
    return logits.detach().nan_to_num()
