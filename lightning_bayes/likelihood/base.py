"""The distribution of the targets given one output of a network: one file for each kind.

    p(y | x) ≈ (1/S) Σ_s p(y | f(x, θ_s))        H_i = -E_{y ~ p(y | f_i)} ∂² log p(y | f_i)/∂f²

Outputs are ``[B, …]``; outputs under S samples are ``[S, B, …]``. A kind that takes several outputs of ``forward``, such as
a mean and a variance, gets a tuple of them. Kinds that average log-probabilities or logarithms say so in `combine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Generator, Tensor

from lightning_bayes.errors import HyperparameterError, PosteriorError


class OutputLikelihood(ABC):
    """What a loss says about an output of ``forward``.

    Attributes:
        name: The kind's name in files and arguments, such as ``"categorical"``.
        has_temperature: Whether dividing the output by a temperature gives a distribution of the same kind.
    """

    name: ClassVar[str]
    has_temperature: ClassVar[bool] = False

    @abstractmethod
    def log_prob(self, outputs: Any, targets: Tensor) -> Tensor:
        """Log p(y | f) of each target, in nats.

        Args:
            outputs: One output, ``[B, …]``.
            targets: Targets of the same examples, ``[B, …]``.

        Returns:
            One value per target, ``[B, …]``. Weights of classes and examples are not part of it.
        """

    @abstractmethod
    def combine(self, outputs: Any) -> Any:
        """One output ``[B, …]`` that represents the average over samples of ``[S, B, …]``, in the form of one output."""

    @abstractmethod
    def summarise(self, outputs: Any, interval: float = 0.9) -> NamedTuple:
        """The prediction from outputs ``[S, B, …]``: probabilities, moments, or moments with noise and an interval."""

    def sample(self, outputs: Any, generator: Generator) -> Tensor:
        """Draw one target for each position of outputs ``[B, …]``; the global random state is not used."""
        raise HyperparameterError(
            f"{type(self).__name__} cannot draw targets. Use curvature='ggn' or 'empirical_fisher'."
        )

    def root(self, outputs: Tensor, index: int) -> Tensor:
        """Column `index` of a square root of the output curvature: Σ_index v vᵀ = H_i; in the shape of `outputs`."""
        raise HyperparameterError(
            f"{type(self).__name__} does not define its curvature. Override its method root, or draw targets from it with "
            "curvature='fisher'."
        )

    def target_shape(self, outputs: Any, targets: Tensor) -> tuple[int, ...]:
        """The layout of targets beside outputs ``[B, …]``: by default that of the outputs, if the sizes agree."""
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        return tuple(first.shape if first.numel() == targets.numel() else targets.shape)

    def state(self) -> dict[str, Any]:
        """The kind and its settings as plain values, for a checkpoint or a posterior file."""
        return {"kind": self.name, **vars(self)}

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


KINDS: dict[str, type[OutputLikelihood]] = {}  # by name
