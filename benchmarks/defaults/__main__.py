"""Callbacks with default arguments, compared with the user's optimizer alone at equal epochs.

    python -m benchmarks.defaults --root DATA [--problems digits yacht] [--methods user vogn] [--optimizers adam]
        [--first-seed 0] [--seeds 5] [--json defaults.json] [--table] [--against user flat]

See `benchmarks.defaults.methods` for the names of methods and controls.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from benchmarks.defaults.methods import CALLBACKS, PEER, make_callback
from benchmarks.defaults.problems import PROBLEMS
from benchmarks.defaults.scores import classification_scores, ood_scores, regression_scores
from benchmarks.defaults.study import Record, run_study, study_parser
from benchmarks.defaults.table import SCORES, differences, table
from benchmarks.defaults.training import OPTIMIZERS, train_and_predict
from lightning_bayes.errors import NonFiniteError

DIVERGED = {**dict.fromkeys(SCORES, math.nan), "seconds": 0.0}


def run(root: Path, problem_name: str, optimizer: str, method: str, seed: int) -> list[Record]:
    """Train and score one combination; the scores of a run that diverges are NaN."""
    problem = PROBLEMS[problem_name]
    data = problem.load(root, seed)
    chance = {"chance": problem.chance(data)}
    try:
        outputs, seconds = train_and_predict(problem, data, optimizer, method, seed)
    except NonFiniteError:
        return [{**chance, **DIVERGED}]
    if not outputs.test.isfinite().all():
        return [{**chance, **DIVERGED}]
    score = regression_scores if problem.is_regression else classification_scores
    ood = {} if outputs.ood is None else ood_scores(*outputs)
    return [{**chance, **score(outputs.test, data.test_y), **ood, "seconds": round(seconds, 1)}]


def _method(name: str) -> str:
    """Check the name of a method; see `make_callback`."""
    if name != PEER:
        try:
            make_callback(name, seed=0)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return name


def main() -> None:
    """Run the missing combinations, save them, and print the table."""
    parser = study_parser(__doc__, first_seed=0, seeds=5, problems=PROBLEMS, optimizers=OPTIMIZERS)
    parser.set_defaults(optimizers=["adam"])
    parser.add_argument("--methods", nargs="+", type=_method, default=[*CALLBACKS, PEER])
    parser.add_argument("--against", type=_method, nargs="*", help="also print paired differences from these methods")
    options = parser.parse_args()
    records = run_study(options, ("problems", "optimizers", "methods"), run, "runs")
    print(table(records))
    for other in options.against or ():
        print(f"\nMinus {other}, mean and standard error of paired differences:\n")
        print(differences(records, other))


if __name__ == "__main__":
    main()
