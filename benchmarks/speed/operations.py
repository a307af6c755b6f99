"""Number of torch operations in a training step, compared with torch's Adam.

    python -m benchmarks.speed.operations [--models lenet] [--batch 32]

The step of a small model is dominated by the launch of operations, a few microseconds each, not by arithmetic. An update
includes forward, backward and optimizer. For methods that do not measure in every update, each kind of update is counted.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.speed.methods import CYCLE, METHODS, silence_known_warnings
from benchmarks.speed.models import MODELS, make_task
from benchmarks.speed.rounds import MeanOfUpdates, Step
from benchmarks.speed.setting import Setting

METHODS_COUNTED = ("adam", "vogn-default", "vadam-default", "ivon-default")


class OperationCount(TorchDispatchMode):
    """Counts the operations below autograd, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.counts[name] += 1
        result = func(*args, **(kwargs or {}))
        if name.startswith("aten::_foreach_") and name.split(".")[0].endswith("_"):
            for tensor in args[0]:  # torch does not bump these versions under a mode, and the sampler checks them
                increment_version(tensor)
        return result


def count(step: Step) -> Counter[str]:
    """Count the operations of one call."""
    with OperationCount() as counted:
        step()
    return counted.counts


def count_kinds(model: str, batch: int, method: str) -> Iterator[tuple[str, Counter[str]]]:
    """Yield each kind of update of a method, with its operations by name."""
    step = METHODS[method].build(make_task(MODELS[model], batch, Setting()))
    for _ in range(2):
        step()
    if not isinstance(step, MeanOfUpdates):
        yield "each update", count(step)
        return
    kinds = [count(step.update) for _ in range(CYCLE)]
    yield "no measurement, after one", kinds[0]
    yield "no measurement, draws noise", kinds[2]
    yield "no measurement, uses noise again", kinds[3]
    yield "measures", kinds[-1]


def main(arguments: list[str] | None = None) -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["lenet"], choices=MODELS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--most", type=int, default=0, help="also list this many of the most frequent operations")
    options = parser.parse_args(arguments)
    silence_known_warnings()
    for model in options.models:
        for method in METHODS_COUNTED:
            for kind, counts in count_kinds(model, options.batch, method):
                print(f"{MODELS[model].title:10} {METHODS[method].title:22} {kind:32} {counts.total():5} operations")
                for name, times in counts.most_common(options.most):
                    print(f"{'':12}{times:5} {name}")


if __name__ == "__main__":
    main()
