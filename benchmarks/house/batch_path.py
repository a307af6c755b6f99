"""How far a reader has to travel to follow one batch of VOGN.

A function counts as a stop if it is entered from another file: there the reader has to open the next one. Stops inside
``curvature/`` and what it calls are left out, because they measure the backward pass and their number depends on the
layers, and so are comprehensions, lambdas and generated code. The goal is for public functions. Private methods that a
subclass in another file overrides are stops as well; the table has a line of its own for them.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.trees import run_probe

_LEFT_OUT = "lightning_bayes/curvature/"


class Stop(NamedTuple):
    """A function that is entered from another file."""

    file: str
    function: str

    @property
    def is_public(self) -> bool:
        """Whether the function's own name starts without an underscore."""
        return not self.function.rpartition(".")[2].startswith("_")


def batch_stops(calls: list[tuple[str, str, int, str]]) -> list[Stop]:
    """Reduce recorded calls to stops.

    Args:
        calls: File, function, first line and calling file of each call.

    Returns:
        The distinct stops.
    """
    stops = {
        (file, function, line)
        for file, function, line, caller in calls
        if file != caller and not file.startswith(_LEFT_OUT) and not caller.startswith(_LEFT_OUT)
    }
    return [Stop(file, function) for file, function, _ in sorted(stops)]


def trace_batch(root: str) -> list[Stop]:
    """Trace one batch in a tree.

    Args:
        root: The root of the tree.

    Returns:
        The stops of one batch.
    """
    return batch_stops([tuple(call) for call in run_probe("house/batch_probe", root)])
