"""Where each layer call of a pass holds the examples: found in the first pass of each kind, and reused in later ones.

Passes are of one kind if they call the same layers and have the same pattern of equal sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from torch import nn

from lightning_bayes.curvature.layout_search import LayoutSearch, NotFiniteError, PassLayouts
from lightning_bayes.curvature.layouts import REGROUPED

Kind: TypeAlias = tuple[tuple[str, ...], tuple[int, ...]]  # labels of the called layers, and the pattern of equal sizes

_MAX_PROBES = 5  # per kind of pass, if some layers get no gradient, such as layers before zero weights


class _Plan(NamedTuple):
    """The layouts for one kind of pass. Its n is the size at `position` among the sizes of the pass, divided by `factor`."""

    position: int
    factor: int
    result: PassLayouts

    def for_pass(self, search: LayoutSearch) -> PassLayouts | None:
        """The layouts for a pass of this kind; None if its sizes do not allow them."""
        n, remainder = divmod(search.sizes[self.position], self.factor)
        pairs = zip(search.outputs, self.result.layouts, strict=True)
        regrouped = [out for out, layout in pairs if layout is not None and layout.kind in REGROUPED]
        if remainder or any(out.rows % max(n, 1) for out in regrouped):
            return None
        return replace(self.result, num_examples=max(n, 1))


class ExampleProbe:
    """Finds the layouts of passes, and remembers them by kind."""

    def __init__(self) -> None:
        self._plans: dict[Kind, _Plan] = {}
        self._probes: Counter[Kind] = Counter()
        self.failing: dict[Kind, set[nn.Parameter]] = {}  # parameters that failed the check, by checked kind

    def find(self, search: LayoutSearch, following: Callable[[], AbstractContextManager[None]]) -> PassLayouts | None:
        """The layouts for the pass of a search, which runs in the context; None if no backward can follow examples."""
        kind = _kind(search)
        planned = self._plans[kind].for_pass(search) if kind in self._plans else None
        if planned is not None:
            return replace(planned, kind=kind)
        try:
            with following():
                result = search.run()
        except NotFiniteError:  # the update will be skipped
            return PassLayouts(search.outputs[-1].rows, (None,) * len(search.outputs))
        if result is None or result.error:
            return result
        result = replace(result, kind=kind)
        self._probes[kind] += 1
        if result.is_settled or self._probes[kind] >= _MAX_PROBES:
            n, sizes = result.num_examples, search.sizes
            position = sizes.index(n if n in sizes else next(size for size in sizes if size and size % n == 0))
            self._plans[kind] = _Plan(position, sizes[position] // n, result)
        return result


def _kind(search: LayoutSearch) -> Kind:
    numbers: dict[int, int] = {}
    pattern = tuple(numbers.setdefault(size, len(numbers)) for size in search.sizes)
    return tuple(out.unit.label for out in search.outputs), pattern
