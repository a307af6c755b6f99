"""Compare the working tree with an old commit: ``python -m benchmarks.before REV``.

python -m benchmarks.before f07f3a5                 # 50 steps of every optimizer and callback, weight by weight
python -m benchmarks.before f07f3a5 --speed         # the time of a step, both trees taking turns
python -m benchmarks.before f07f3a5 --json FILE     # also write the result with machine, versions and commits
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.before import speed, trajectories
from benchmarks.provenance import provenance
from benchmarks.trees import ROOT, short_name, worktree


def main(arguments: list[str] | None = None) -> None:
    """Compare, print and write.

    Args:
        arguments: The command line; by default that of the process.
    """
    options = _parser().parse_args(arguments)
    with worktree(options.revision) as before:
        result = _speed(before, options) if options.speed else _trajectories(before)
    if options.json:
        described = {"before": short_name(options.revision), **provenance(), **result}
        options.json.write_text(json.dumps(described, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.before", description="Compare with an old commit.")
    parser.add_argument("revision", help="the commit to compare with")
    parser.add_argument("--speed", action="store_true", help="time steps in place of comparing trajectories")
    parser.add_argument("--models", default=",".join(speed.BLOCKS), help="models to time, separated by commas")
    parser.add_argument("--rounds", type=int, default=20, help="blocks of steps in each tree")
    parser.add_argument("--clock", default="cpu", choices=["wall", "cpu"], help="cpu is the process's own time")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch in each process")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the result is written")
    return parser


def _trajectories(before: Path) -> dict[str, Any]:
    compared = trajectories.compare(trajectories.record(before), trajectories.record(ROOT))
    different = [each for each in compared if not each.is_equal]
    for each in [*different, *(each for each in compared if each.is_equal and each.remark)]:
        print(
            f"{each.name}: {'differs' if each in different else 'the same error'} {each.difference:.3g} {each.remark}"
        )
    largest = max((each.difference for each in compared if each.is_equal), default=0.0)
    print(f"{len(compared)} trajectories, {len(different)} differ by {trajectories.TOLERANCE:g} or more; ", end="")
    print(f"the others by at most {largest:.3g}")
    return {"tolerance": trajectories.TOLERANCE, "differences": {each.name: each.difference for each in compared}}


def _speed(before: Path, options: argparse.Namespace) -> dict[str, Any]:
    models = options.models.split(",")
    if unknown := sorted(set(models) - set(speed.BLOCKS)):
        raise SystemExit(f"There is no model {', '.join(unknown)} to time. These are: {', '.join(speed.BLOCKS)}.")
    compared = speed.compare(before, ROOT, models, options.rounds, options.clock, options.threads)
    print(f"{'method':<10} {'model':<9} {'before':>10} {'now':>10}  ratio (quartiles)")
    for each in compared:
        times = f"{1e3 * each.before:>7.2f} ms {1e3 * each.after:>7.2f} ms"
        print(
            f"{each.method:<10} {each.model:<9} {times}  {each.ratio:.3f} ({each.quartiles[0]:.3f}–{each.quartiles[1]:.3f})"
        )
    setting = {"clock": options.clock, "threads": options.threads, "rounds": options.rounds}
    return {**setting, "steps": [each._asdict() for each in compared]}


if __name__ == "__main__":
    main()
