"""Compare the working tree with an old commit: ``python -m benchmarks.before REV``.

python -m benchmarks.before f07f3a5                 # 50 steps of every optimizer and callback, weight by weight
python -m benchmarks.before f07f3a5 --speed         # the time of a step; both trees take turns
python -m benchmarks.before f07f3a5 --json FILE     # also write the result with machine, versions and commits
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.before import speed, trajectories
from benchmarks.house.trees import ROOT, short_name, worktree
from benchmarks.provenance import provenance


def main(arguments: list[str] | None = None) -> None:
    """Compare, print and save."""
    options = _parser().parse_args(arguments)
    with worktree(options.revision) as before:
        result = _speed(before, options) if options.speed else _trajectories(before)
    if options.json:
        described = {"before": short_name(options.revision), **provenance(), **result}
        options.json.write_text(json.dumps(described, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.before", description="Compare with an old commit.")
    parser.add_argument("revision", help="the commit to compare with")
    parser.add_argument("--speed", action="store_true", help="time steps instead of comparing trajectories")
    parser.add_argument("--models", default=",".join(speed.BLOCKS), help="models to time, separated by commas")
    parser.add_argument("--rounds", type=int, default=20, help="blocks of steps in each tree")
    parser.add_argument("--clock", default="cpu", choices=["wall", "cpu"], help="cpu is processor time")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch in each process")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    return parser


def _trajectories(before: Path) -> dict[str, Any]:
    comparisons = trajectories.compare(trajectories.record(before), trajectories.record(ROOT))
    different = [c for c in comparisons if not c.is_equal]
    equal = [c for c in comparisons if c.is_equal]
    for comparison in different:
        print(f"{comparison.name}: differs {comparison.difference:.3g} {comparison.remark}")
    for comparison in equal:
        if comparison.remark:
            print(f"{comparison.name}: the same error {comparison.difference:.3g} {comparison.remark}")
    largest = max((c.difference for c in equal), default=0.0)
    print(f"{len(comparisons)} trajectories, {len(different)} differ by {trajectories.TOLERANCE:g} or more; ", end="")
    print(f"the others by at most {largest:.3g}")
    return {"tolerance": trajectories.TOLERANCE, "differences": {c.name: c.difference for c in comparisons}}


def _speed(before: Path, options: argparse.Namespace) -> dict[str, Any]:
    models = options.models.split(",")
    unknown = sorted(set(models) - set(speed.BLOCKS))
    if unknown:
        raise SystemExit(f"Unknown model {', '.join(unknown)}. Choose from {', '.join(speed.BLOCKS)}.")
    comparisons = speed.compare(before, ROOT, models, options.rounds, options.clock, options.threads)
    print(f"{'method':<10} {'model':<9} {'before':>10} {'now':>10}  ratio (quartiles)")
    for comparison in comparisons:
        times = f"{1e3 * comparison.before:>7.2f} ms {1e3 * comparison.after:>7.2f} ms"
        quartiles = "{:.3f}–{:.3f}".format(*comparison.quartiles)
        print(f"{comparison.method:<10} {comparison.model:<9} {times}  {comparison.ratio:.3f} ({quartiles})")
    setting = {"clock": options.clock, "threads": options.threads, "rounds": options.rounds}
    return {**setting, "steps": [comparison._asdict() for comparison in comparisons]}


if __name__ == "__main__":
    main()
