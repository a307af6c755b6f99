"""Number of functions that a reader has to open to follow one batch of VOGN.

A function is a stop if it is entered from another file. Stops inside ``curvature/`` and its callees are excluded, because
they measure the backward pass and their number depends on the layers; so are comprehensions, lambdas and generated code. The
goal applies to public functions. A separate row of the table adds private methods that a subclass in another file overrides.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.trees import run_probe

_EXCLUDED = "lightning_bayes/curvature/"


class Stop(NamedTuple):
    """A function that is entered from another file."""

    file: str
    function: str

    @property
    def is_public(self) -> bool:
        """Whether the name of the function has no leading underscore."""
        return not self.function.rpartition(".")[2].startswith("_")


def batch_stops(calls: list[tuple[str, str, int, str]]) -> list[Stop]:
    """The distinct stops among calls, each given by file, function, first line and calling file."""
    stops = {
        (file, function, line)
        for file, function, line, caller in calls
        if file != caller and not file.startswith(_EXCLUDED) and not caller.startswith(_EXCLUDED)
    }
    return [Stop(file, function) for file, function, _ in sorted(stops)]


def trace_batch(root: str) -> list[Stop]:
    """The stops of one batch, traced in the tree at `root`."""
    return batch_stops([tuple(call) for call in run_probe("house/batch_probe", root)])
