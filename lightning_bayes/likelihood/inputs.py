"""`Inputs`: how a training step calls ``forward``, so that every later pass calls it with the same entries of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from lightning_bayes.likelihood.paths import Path, leaf_at

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword


@final
@dataclass(frozen=True)
class Inputs:
    """How a training step calls ``forward``: the path in the batch of each argument, or the constant that it is.

    Attributes:
        args: Of the positional arguments: ``("path", path)`` or ``("value", constant)``.
        kwargs: Of the keyword arguments.
    """

    args: tuple[tuple[str, Any], ...] = ()
    kwargs: dict[str, tuple[str, Any]] = field(default_factory=dict)

    @staticmethod
    def found(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: Iterable[tuple[Path, Any]]) -> Inputs | None:
        """The inputs of a call, by the entries of a batch; None if an argument is neither one of them nor a constant."""
        places = {id(value): path for path, value in reversed([*batch])}
        positional = [_argument(value, places) for value in args]
        named = {name: _argument(value, places) for name, value in kwargs.items()}
        if None in positional or None in named.values():
            return None
        return Inputs(tuple(each for each in positional if each), {name: each for name, each in named.items() if each})

    def of(self, batch: Any) -> Arguments:
        """The arguments of ``forward`` for a batch, without keyword arguments that it lacks; else a `LookupError`."""
        kwargs = {name: argument for name, argument in self.kwargs.items() if _is_in(batch, argument)}
        return (
            tuple(_value(argument, batch) for argument in self.args),
            {name: _value(argument, batch) for name, argument in kwargs.items()},
        )

    @property
    def count(self) -> int:
        """The number of arguments that are entries of the batch."""
        return sum(kind == "path" for kind, _ in (*self.args, *self.kwargs.values()))

    def filled(self, values: Sequence[Any]) -> Arguments:
        """The arguments with these values, in order, in place of entries of a batch."""
        given = iter(values)
        args = tuple(next(given) if kind == "path" else value for kind, value in self.args)
        return args, {n: next(given) if kind == "path" else value for n, (kind, value) in self.kwargs.items()}

    def state(self) -> dict[str, Any]:
        """This value as plain data."""
        return {
            "args": [[kind, _plain(value)] for kind, value in self.args],
            "kwargs": {name: [kind, _plain(value)] for name, (kind, value) in self.kwargs.items()},
        }

    @staticmethod
    def of_state(state: Mapping[str, Any]) -> Inputs:
        """The value of `state`."""
        return Inputs(
            tuple(_of_plain(*each) for each in state["args"]),
            {name: _of_plain(*each) for name, each in state["kwargs"].items()},
        )


def arguments_of(forward: Callable[..., Any], x: Any, inputs: Inputs | None) -> Arguments:
    """The arguments of a network for its inputs, one, a tuple of several or a dictionary, or for a batch with targets."""
    if isinstance(x, Mapping):
        return _named_arguments(forward, x, inputs)
    if not isinstance(x, (tuple, list)) or (inputs is not None and inputs.count < 2):
        return (x,), {}
    if inputs is None:
        return (tuple(x), {}) if len(x) == num_required(forward) > 1 else ((x,), {})
    return inputs.of(x) if len(x) > inputs.count else inputs.filled(x)


def _named_arguments(forward: Callable[..., Any], x: Mapping[Any, Any], inputs: Inputs | None) -> Arguments:
    takes_whole = inputs is not None and inputs.args == (("path", ()),)
    if inputs is not None and not takes_whole and all(_is_in(x, argument) for argument in inputs.args):
        args, kwargs = inputs.of(x)
        if args or kwargs:
            return args, kwargs
    parameters = inspect.signature(forward).parameters.values()
    is_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    named = {str(name): value for name, value in x.items() if is_any or name in {each.name for each in parameters}}
    return ((), named) if named and not takes_whole else ((x,), {})


def num_required(forward: Callable[..., Any]) -> int:
    """The number of positional arguments without a default."""
    parameters = inspect.signature(forward).parameters.values()
    return sum(p.default is p.empty and p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD} for p in parameters)


def _argument(value: Any, places: Mapping[int, Path]) -> tuple[str, Any] | None:
    if id(value) in places:
        return "path", places[id(value)]
    return ("value", value) if value is None or isinstance(value, (bool, int, float, str)) else None


def _value(argument: tuple[str, Any], batch: Any) -> Any:
    kind, value = argument
    return leaf_at(batch, value) if kind == "path" else value


def _is_in(batch: Any, argument: tuple[str, Any]) -> bool:
    try:
        _value(argument, batch)
    except (LookupError, AttributeError, TypeError):
        return False
    return True


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _of_plain(kind: str, value: Any) -> tuple[str, Any]:
    return kind, tuple(value) if kind == "path" else value
