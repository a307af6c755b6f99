"""Time of a step in two trees: two processes, each with the package of one tree, take turns block by block.

A busy machine slows both, so ratios are computed within a round; the order changes from round to round.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.house.trees import environment, probe_command

METHODS = ("VOGN", "NoisyKFAC")
BLOCKS = {"lenet5": 20, "resnet18": 10}  # steps; multiples of 10, the interval of measurements of Noisy K-FAC
WARM_UP = 1  # blocks


class Comparison(NamedTuple):
    """A method's step on a model in both trees.

    Attributes:
        method: The optimizer.
        model: Name of the model in the zoo.
        before: Median seconds per step in the old tree.
        after: The same in the new tree.
        ratio: Median over rounds of the new time over the old one.
        quartiles: First and third quartile of these ratios.
    """

    method: str
    model: str
    before: float
    after: float
    ratio: float
    quartiles: tuple[float, float]


class Worker:
    """A process that times steps with the package of one tree.

    Args:
        process: The running probe.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def time(self, method: str, model: str, steps: int) -> float:
        """Time a block.

        Args:
            method: The optimizer.
            model: Name of the model in the zoo.
            steps: Length of the block.

        Returns:
            Seconds per step.

        Raises:
            SystemExit: If the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(method, model, steps, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"The process that times {method} on {model} has ended; its error is above.")
        return float(answer)


@contextmanager
def worker(root: Path, clock: str, threads: int) -> Iterator[Worker]:
    """Start a worker in a tree, with a clock and torch's threads; the end of the context ends it."""
    command = probe_command("before/speed_probe", clock, str(threads))
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=root, env=environment(root), stdin=pipe, stdout=pipe, text=True) as process:
        yield Worker(process)
        process.communicate()  # closes its input, which ends it


def compare(before: Path, after: Path, models: list[str], rounds: int, clock: str, threads: int) -> list[Comparison]:
    """Time every method on every model in both trees, with `rounds` blocks per tree after the warm-up."""
    with ExitStack() as stack:
        workers = [stack.enter_context(worker(root, clock, threads)) for root in (before, after)]
        return [_compare(workers, method, model, rounds) for model in models for method in METHODS]


def _compare(workers: list[Worker], method: str, model: str, rounds: int) -> Comparison:
    seconds: list[list[float]] = [[], []]
    for turn in range(WARM_UP + rounds):
        for index in (0, 1) if turn % 2 else (1, 0):
            seconds[index].append(workers[index].time(method, model, BLOCKS[model]))
    before, after = (times[WARM_UP:] for times in seconds)
    return summarise(method, model, before, after)


def summarise(method: str, model: str, before: list[float], after: list[float]) -> Comparison:
    """Summarise the times of all rounds.

    Args:
        method: The optimizer.
        model: Name of the model in the zoo.
        before: Seconds per step in the old tree by round, at least two.
        after: The same in the new tree.

    Returns:
        The comparison.

    Example:
        >>> summarise("VOGN", "lenet5", [1.0, 2.0, 4.0], [1.0, 2.2, 4.0]).ratio
        1.0
    """
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    first, _, third = statistics.quantiles(ratios, n=4, method="inclusive")
    medians = statistics.median(before), statistics.median(after)
    return Comparison(method, model, *medians, statistics.median(ratios), (first, third))
