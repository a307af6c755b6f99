"""Whether a change of the source leaves short fits bit for bit as they were.

    python -m benchmarks.house.trajectories --before main~3          # about a minute on one core
    python -m benchmarks.house.trajectories --before main~3 --only vit

A case is a method, a network, and what the trainer does: nothing, accumulation, a resume in the middle, or two processes.
Its trajectory is a hash of the weights and of the optimizer's state after 24 batches. The first ten measure the curvature.
"""

from __future__ import annotations

import argparse

from benchmarks.house.trees import ROOT, run_probe, short_name, worktree


def main(arguments: list[str] | None = None) -> None:
    """Run all cases in both trees, and print those that differ."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.house.trajectories",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--before", metavar="REV", required=True, help="a commit to compare with the working tree")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    options = parser.parse_args(arguments)
    after = run_probe("house/fits", ROOT, options.only)
    with worktree(options.before) as tree:
        before = run_probe("house/fits", tree, options.only)
    differing = [name for name, trajectory in after.items() if before.get(name) != trajectory]
    for name in differing:
        print(f"{name}: {before.get(name)} before, {after[name]} now")
    equal = len(after) - len(differing)
    print(f"{equal} of {len(after)} trajectories equal those of {short_name(options.before)} bit for bit.")


if __name__ == "__main__":
    main()
