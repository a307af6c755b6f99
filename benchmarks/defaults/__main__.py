"""Defaults that train: callbacks without arguments against the user's own optimizer, at equal epochs.

    python -m benchmarks.defaults --root DATA [--problems digits yacht] [--methods user vogn] [--optimizers adam]
        [--first-seed 0] [--seeds 5] [--json benchmarks/results/defaults.json] [--table | --markdown] [--against user flat]

``vogn@0.1`` has that noise scale, ``vogn@0:0.1`` grows to it, ``vogn@0.3~1`` has that scale and flatness, ``vogn/1``
measures at every update, ``vogn+scale`` has the width of `PosteriorScale`, and ``vogn+mean`` none; ``flat`` and
``permuted`` are controls; ``laplace``, ``laplace_all``, ``swag`` and ``ensemble`` begin with the user's training. See
`benchmarks.defaults.methods`.
Runs that the JSON file holds already are not repeated. `--table` and `--markdown` only print what it holds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

from benchmarks.defaults.methods import CALLBACKS, PEER, make_callback
from benchmarks.defaults.problems import DEFAULT, PROBLEMS
from benchmarks.defaults.scores import classification_scores, ood_scores, regression_scores
from benchmarks.defaults.table import OOD, SCORES, Record, differences, table
from benchmarks.defaults.training import OPTIMIZERS, train_and_predict
from benchmarks.provenance import provenance
from lightning_bayes.errors import NonFiniteError

DIVERGED = {**dict.fromkeys(SCORES, math.nan), "seconds": 0.0}


def run(problem: str, optimizer: str, method: str, seed: int, root: Path) -> Record:
    """Train and score one combination; a run that diverges has scores that are not numbers."""
    what = PROBLEMS[problem]
    data = what.load(root, seed)
    key = {"problem": problem, "optimizer": optimizer, "method": method, "seed": seed, "chance": what.chance(data)}
    try:
        outputs, seconds = train_and_predict(what, data, optimizer, method, seed)
    except NonFiniteError:
        return {**key, **DIVERGED}
    if not outputs.test.isfinite().all():
        return {**key, **DIVERGED}
    score = regression_scores if what.is_regression else classification_scores
    outside = {} if outputs.ood is None else ood_scores(*outputs)
    return {**key, **score(outputs.test, data.test_y), **outside, "seconds": round(seconds, 1)}


def missing(options: argparse.Namespace, records: list[Record]) -> Iterator[tuple[str, str, str, int]]:
    """What is asked for and not there, a whole table for one seed after the other."""
    done = {(r["problem"], r["optimizer"], r["method"], r["seed"]) for r in records}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for problem in options.problems:
            for optimizer in options.optimizers:
                for method in options.methods:
                    if (problem, optimizer, method, seed) not in done:
                        yield problem, optimizer, method, seed


def _method(name: str) -> str:
    """A method; see `make_callback`."""
    if name != PEER:
        try:
            make_callback(name, seed=0, updates=1)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return name


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(DEFAULT))
    parser.add_argument("--methods", nargs="+", type=_method, default=[*CALLBACKS, PEER])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["adam"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--against", type=_method, nargs="*", help="print paired differences from these methods too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Run what is missing, keep it, print the table."""
    options = _options()
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    records: list[Record] = known.get("runs", [])
    for problem, optimizer, method, seed in (
        [] if options.table or options.markdown else list(missing(options, records))
    ):
        records.append(run(problem, optimizer, method, seed, options.root))
        last = ", ".join(f"{name} {value:.4f}" for name, value in records[-1].items() if name in (*SCORES, *OOD))
        print(f"{problem} {optimizer} {method} seed {seed}: {last} ({records[-1]['seconds']} s)", flush=True)
        if options.json:
            options.json.write_text(json.dumps({**provenance(), "runs": records}, indent=1) + "\n")
    print(table(records, options.markdown))
    for other in options.against or ():
        print(f"\nMinus {other}, mean and standard error of paired differences:\n")
        print(differences(records, other, options.markdown))


if __name__ == "__main__":
    main()
