"""Defaults that train: callbacks without arguments against the user's own optimizer, at equal epochs.

    python -m benchmarks.defaults --root DATA [--problems digits yacht] [--methods user vogn] [--optimizers adam]
        [--seeds 5] [--json benchmarks/results/defaults.json] [--table]

Runs that the JSON file holds already are not repeated. `--table` only prints what it holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.defaults.problems import DEFAULT, PROBLEMS
from benchmarks.defaults.scores import classification_scores, regression_scores
from benchmarks.defaults.training import CALLBACKS, OPTIMIZERS, PEER, train_and_predict
from benchmarks.defaults.verdict import failures
from benchmarks.provenance import provenance

SCORES = ("error", "nll", "calibration")
Record = dict[str, Any]


def run(problem: str, optimizer: str, method: str, seed: int, root: Path) -> Record:
    """Train and score one combination."""
    what = PROBLEMS[problem]
    data = what.load(root, seed)
    outputs, seconds = train_and_predict(what, data, optimizer, method, seed)
    score = regression_scores if what.is_regression else classification_scores
    scores = score(outputs, data.test_y)
    key = {"problem": problem, "optimizer": optimizer, "method": method, "seed": seed}
    return {**key, **scores, "seconds": round(seconds, 1), "chance": what.chance(data)}


def missing(options: argparse.Namespace, records: list[Record]) -> Iterator[tuple[str, str, str, int]]:
    """What is asked for and not there, a whole table for one seed after the other."""
    done = {(r["problem"], r["optimizer"], r["method"], r["seed"]) for r in records}
    for seed in range(options.seeds):
        for problem in options.problems:
            for optimizer in options.optimizers:
                for method in options.methods:
                    if (problem, optimizer, method, seed) not in done:
                        yield problem, optimizer, method, seed


def table(records: list[Record]) -> str:
    """Means over seeds, and the promises that are broken."""
    lines = [
        f"{'problem':16}{'optimizer':14}{'method':12}{'seeds':>6}{'error':>10}{'nll':>10}{'calibration':>13}  broken"
    ]
    groups: dict[tuple[str, str, str], dict[int, Record]] = {}
    for record in records:
        key = record["problem"], record["optimizer"], record["method"]
        groups.setdefault(key, {})[record["seed"]] = record
    for (problem, optimizer, method), by_seed in sorted(groups.items(), key=lambda item: _order(item[0])):
        means = (statistics.mean(r[name] for r in by_seed.values()) for name in SCORES)
        error, nll, calibration = means
        broken = _broken(by_seed, groups.get((problem, optimizer, "user"), {}), method)
        lines.append(
            f"{problem:16}{optimizer:14}{method:12}{len(by_seed):6}{error:10.4f}{nll:10.4f}{calibration:13.4f}  {broken}"
        )
    return "\n".join(lines)


def _broken(method: dict[int, Record], user: dict[int, Record], name: str) -> str:
    seeds = sorted(method.keys() & user.keys())
    if name == "user" or not seeds:
        return ""
    problem = PROBLEMS[user[seeds[0]]["problem"]]
    mine, theirs = [method[seed] for seed in seeds], [user[seed] for seed in seeds]
    return ", ".join(failures(mine, theirs, problem.is_regression, mine[0]["chance"])) or "none"


def _order(key: tuple[str, str, str]) -> tuple[int, str, int]:
    methods = [*CALLBACKS, PEER]
    return list(PROBLEMS).index(key[0]), key[1], methods.index(key[2])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(DEFAULT))
    parser.add_argument("--methods", nargs="+", choices=[*CALLBACKS, PEER], default=[*CALLBACKS, PEER])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["adam"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Run what is missing, keep it, print the table."""
    options = _options()
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    records: list[Record] = known.get("runs", [])
    for problem, optimizer, method, seed in [] if options.table else list(missing(options, records)):
        records.append(run(problem, optimizer, method, seed, options.root))
        last = ", ".join(f"{name} {records[-1][name]:.4f}" for name in SCORES)
        print(f"{problem} {optimizer} {method} seed {seed}: {last} ({records[-1]['seconds']} s)", flush=True)
        if options.json:
            options.json.write_text(json.dumps({**provenance(), "runs": records}, indent=1) + "\n")
    print(table(records))


if __name__ == "__main__":
    main()
