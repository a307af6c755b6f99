"""Callbacks with default arguments, compared with the user's optimizer alone at equal epochs.

    python -m benchmarks.defaults --root DATA [--problems digits yacht] [--methods user vogn] [--optimizers adam]
        [--first-seed 0] [--seeds 5] [--json defaults.json] [--table] [--against user flat]

See `benchmarks.defaults.methods` for the names of methods and controls.
Runs that are already in the JSON file are skipped. `--table` only prints the file.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from benchmarks.defaults.methods import CALLBACKS, PEER, make_callback
from benchmarks.defaults.problems import PROBLEMS
from benchmarks.defaults.scores import classification_scores, ood_scores, regression_scores
from benchmarks.defaults.table import OOD, SCORES, Record, differences, table
from benchmarks.defaults.training import OPTIMIZERS, train_and_predict
from benchmarks.provenance import save_json, saved_rows
from lightning_bayes.errors import NonFiniteError

DIVERGED = {**dict.fromkeys(SCORES, math.nan), "seconds": 0.0}


def run(problem_name: str, optimizer: str, method: str, seed: int, root: Path) -> Record:
    """Train and score one combination; the scores of a run that diverges are NaN."""
    problem = PROBLEMS[problem_name]
    data = problem.load(root, seed)
    key = {
        "problem": problem_name,
        "optimizer": optimizer,
        "method": method,
        "seed": seed,
        "chance": problem.chance(data),
    }
    try:
        outputs, seconds = train_and_predict(problem, data, optimizer, method, seed)
    except NonFiniteError:
        return {**key, **DIVERGED}
    if not outputs.test.isfinite().all():
        return {**key, **DIVERGED}
    score = regression_scores if problem.is_regression else classification_scores
    ood = {} if outputs.ood is None else ood_scores(*outputs)
    return {**key, **score(outputs.test, data.test_y), **ood, "seconds": round(seconds, 1)}


def missing(options: argparse.Namespace, records: list[Record]) -> Iterator[tuple[str, str, str, int]]:
    """The requested runs without a record. One seed of all combinations is finished before the next seed starts."""
    done = {(r["problem"], r["optimizer"], r["method"], r["seed"]) for r in records}
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for seed, *combination in product(seeds, options.problems, options.optimizers, options.methods):
        if (*combination, seed) not in done:
            yield (*combination, seed)


def _method(name: str) -> str:
    """Check the name of a method; see `make_callback`."""
    if name != PEER:
        try:
            make_callback(name, seed=0)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return name


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", type=_method, default=[*CALLBACKS, PEER])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["adam"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--against", type=_method, nargs="*", help="also print paired differences from these methods")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Run the missing combinations, save them, and print the table."""
    options = _options()
    records: list[Record] = saved_rows(options.json, "runs")
    for problem, optimizer, method, seed in [] if options.table else list(missing(options, records)):
        record = run(problem, optimizer, method, seed, options.root)
        records.append(record)
        scores = ", ".join(f"{name} {value:.4f}" for name, value in record.items() if name in (*SCORES, *OOD))
        print(f"{problem} {optimizer} {method} seed {seed}: {scores} ({record['seconds']} s)", flush=True)
        save_json(options.json, {"runs": records})
    print(table(records))
    for other in options.against or ():
        print(f"\nMinus {other}, mean and standard error of paired differences:\n")
        print(differences(records, other))


if __name__ == "__main__":
    main()
