"""The noise of a training step, from the calls of its loss: `GaussianNLLLoss`, `PoissonNLLLoss`, `torch.distributions`.

Each call is recorded with the recipes of its arguments (`recipes`), so that the distribution of the targets can be computed
for other outputs. The record is plain data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Final, NamedTuple, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, distributions
from torch.distributions import Distribution, Independent, MixtureSameFamily, Normal, Poisson

from lightning_bayes.predictive.recipes import Recipe, RecipeTape, cook, leaves_of

Arguments: TypeAlias = dict[str, Any]


class RecordedNoise(NamedTuple):
    """A call that scored targets: a loss or a class of `torch.distributions`, its arguments and targets as recipes."""

    family: str
    arguments: Arguments
    targets: Recipe | None = None

    def distribution(self, outputs: Sequence[Tensor], weights: Mapping[str, Tensor] | None = None) -> Distribution:
        """The distribution of the targets given the tensors of a model's output, ``[rows, …]`` each."""
        values = {name: _value(recipe, outputs, weights) for name, recipe in self.arguments.items()}
        if self.family in _LOSSES:
            return _LOSSES[self.family](**values)
        built: Distribution = _FAMILIES[self.family](**values, validate_args=False)
        return built

    @property
    def has_one_output(self) -> bool:
        """Whether one argument alone depends on the outputs, such as a mean."""
        return sum("output" in leaves_of(recipe) for recipe in _recipes(self)) == 1

    def state(self) -> list[Any]:
        """The record as plain data, for a checkpoint."""
        parts = {
            name: value.state() if isinstance(value, RecordedNoise) else value for name, value in self.arguments.items()
        }
        return [_MARK, self.family, parts, self.targets]

    @staticmethod
    def of_state(state: list[Any]) -> RecordedNoise:
        """The record of `state`."""
        _, family, parts, targets = state
        is_record = {name: isinstance(part, list) and part[:1] == [_MARK] for name, part in parts.items()}
        return RecordedNoise(
            family, {n: RecordedNoise.of_state(part) if is_record[n] else part for n, part in parts.items()}, targets
        )


_MARK = "noise"


def _value(recipe: Any, outputs: Sequence[Tensor], weights: Mapping[str, Tensor] | None) -> Any:
    if isinstance(recipe, RecordedNoise):
        return recipe.distribution(outputs, weights)
    return cook(recipe, outputs, (), weights)


def _gaussian_nll(input: Tensor, var: Any, eps: float = 1e-6) -> Normal:
    variance = torch.as_tensor(var, dtype=input.dtype, device=input.device)
    if variance.dim() == input.dim() - 1:
        variance = variance.unsqueeze(-1)
    return Normal(input, variance.expand_as(input).clamp_min(eps).sqrt(), validate_args=False)


def _poisson_nll(input: Tensor, log_input: bool = True) -> Poisson:
    return Poisson(input.exp() if log_input else input, validate_args=False)


_LOSSES: Final[dict[str, Callable[..., Distribution]]] = {
    "gaussian_nll_loss": _gaussian_nll,
    "poisson_nll_loss": _poisson_nll,
}
_FUNCTIONS: Final[dict[Any, str]] = {F.gaussian_nll_loss: "gaussian_nll_loss", F.poisson_nll_loss: "poisson_nll_loss"}
_CLASSES: Final = {"Bernoulli", "Categorical", "OneHotCategorical"}  # not of real-valued targets
_PARTS: Final[dict[type[Distribution], tuple[str, ...]]] = {
    MixtureSameFamily: ("mixture_distribution", "component_distribution"),
}
_FAMILIES: Final[dict[str, type[Distribution]]] = {
    name: kind
    for name in distributions.__all__
    if isinstance(kind := getattr(distributions, name), type) and issubclass(kind, Distribution)
}


@final
class NoiseRecorder:
    """Records the calls that score real-valued targets inside its context."""

    def __init__(self, weights: Mapping[str, Tensor], batch: Sequence[Tensor]) -> None:
        self.tape = RecipeTape(weights, batch, dict.fromkeys(_FUNCTIONS, self._record_loss))
        self._records: list[RecordedNoise | None] = []  # None for a call whose arguments have no recipe
        self._undo = ExitStack()

    def __enter__(self) -> NoiseRecorder:
        self._undo.enter_context(self.tape)
        self._undo.enter_context(_scores_noted(self._record_score))
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.close()

    def _record_loss(self, function: Any, *args: Any, **kwargs: Any) -> None:
        """Record a call of a loss function."""
        given, name = dict(inspect.signature(function).bind(*args, **kwargs).arguments), _FUNCTIONS[function]
        used = {n: self.tape.recipe(given[n]) for n in inspect.signature(_LOSSES[name]).parameters if n in given}
        known = all(value is not None for value in used.values())
        self._records.append(RecordedNoise(name, used, self.tape.recipe(given["target"])) if known else None)

    def _record_score(self, distribution: Distribution, targets: Any) -> None:
        """Record a call of `Distribution.log_prob`."""
        record = self._described(distribution)
        self._records.append(None if record is None else record._replace(targets=self.tape.recipe(targets)))

    def _described(self, distribution: Distribution) -> RecordedNoise | None:
        if isinstance(distribution, Independent):  # its targets are scored one by one
            return self._described(distribution.base_dist)
        kind, own = type(distribution), vars(distribution)
        names = _PARTS.get(kind) or [n for n in distribution.arg_constraints if n in own or _is_property(kind, n)]
        values = {name: self._argument(getattr(distribution, name)) for name in names}
        known = _FAMILIES.get(kind.__name__) is kind and all(value is not None for value in values.values())
        return RecordedNoise(kind.__name__, values) if known and not distribution.event_shape else None

    def _argument(self, value: Any) -> Any:
        return self._described(value) if isinstance(value, Distribution) else self.tape.recipe(value)

    def noise(self) -> RecordedNoise | None:
        """The noise that all calls on outputs agree on; None without one, with several, or with unknown arguments."""
        kinds = [set() if record is None else leaves_of(_recipes(record)) for record in self._records]
        on_outputs = [r for r, kind in zip(self._records, kinds, strict=True) if r is None or "output" in kind]
        first = on_outputs[0] if on_outputs else None
        is_one = all(record == first for record in on_outputs) and not any("batch" in kind for kind in kinds)
        return first if is_one and first is not None and first.family not in _CLASSES else None


def _is_property(kind: type, name: str) -> bool:
    return type(getattr(kind, name, None)) is property


def _recipes(record: RecordedNoise) -> list[Any]:
    return [_recipes(value) if isinstance(value, RecordedNoise) else value for value in record.arguments.values()]


@contextmanager
def _scores_noted(note: Callable[[Distribution, Any], None]) -> Iterator[None]:
    """Context in which `note` gets the distribution and the targets of every outermost call of ``log_prob``."""
    depth, originals = [0], []

    def noting(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(original)
        def log_prob(distribution: Distribution, value: Any) -> Tensor:
            depth[0] += 1
            try:
                if depth[0] == 1:
                    note(distribution, value)
                return original(distribution, value)
            finally:
                depth[0] -= 1

        return log_prob

    for kind in {*_FAMILIES.values()}:
        if "log_prob" in vars(kind):
            originals.append((kind, vars(kind)["log_prob"]))
            kind.log_prob = noting(vars(kind)["log_prob"])  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, original in originals:
            kind.log_prob = original  # type: ignore[method-assign]
