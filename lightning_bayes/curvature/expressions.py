"""Values that functions compute from parameters and constants, which can be computed again from other values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn


class Slot:
    """Stands for an argument with examples."""


class Expression(NamedTuple):
    """The call of a function on parameters, slots, constants and other expressions."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    params: frozenset[nn.Parameter]
    position: int | None = None  # of a result among several


def evaluated(x: Any, values: Mapping[Any, Any]) -> Any:
    """What stands in a list, tuple or dictionary, at these values of the parameters and slots."""
    if isinstance(x, Expression):
        result = x.function(*evaluated(x.args, values), **evaluated(x.kwargs, values))
        return result if x.position is None else result[x.position]
    if isinstance(x, dict):
        return {key: evaluated(each, values) for key, each in x.items()}
    if type(x) in {list, tuple}:
        return type(x)(evaluated(each, values) for each in x)
    return values.get(x, x) if isinstance(x, (nn.Parameter, Slot)) else x
