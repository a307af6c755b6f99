"""LeNet-5 of MNIST digits adapted to clothes and to letters with 1000 labelled images, by six methods.

    python -m benchmarks.finetune --root DATA [--seeds 3] [--json benchmarks/results/finetune.json] [--table]

Runs that the JSON file holds already are not repeated; a file of other epochs is refused. `--table` only prints what it
holds. `--validate` measures on further images of the training pool in the place of the test images, for choices.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.finetune.data import SHOTS, TARGETS, digits, target, unfamiliar
from benchmarks.finetune.methods import METHODS, PEER
from benchmarks.finetune.scores import scores
from benchmarks.finetune.training import Weights, pretrain
from benchmarks.over_seeds import mean_and_error
from benchmarks.provenance import provenance
from lightning_bayes.errors import HyperparameterError

# Column of the table by score; the arrow tells which direction is better.
COLUMNS = {
    "accuracy": "accuracy ↑",
    "nll": "NLL ↓",
    "ece": "ECE ↓",
    "ood_auroc": "OOD AUROC ↑",
    "digits_auroc": "of digits ↑",
}
Record = dict[str, Any]


def run(method: str, name: str, seed: int, weights: Weights, options: argparse.Namespace) -> Record:
    """Adapt and score once."""
    images = target(name, options.root, seed, options.validate, options.shots)
    start = time.process_time()
    predict = METHODS[method][1](weights, images.train, seed, options.epochs)
    seconds = round(time.process_time() - start, 1)
    found = scores(predict, images.test, unfamiliar(name, options.root))
    return {"target": name, "method": method, "seed": seed, **found, "cpu_seconds": seconds}


def missing(options: argparse.Namespace, records: list[Record], seed: int) -> list[tuple[str, str]]:
    """Methods and targets that are asked for and not there."""
    done = {(record["method"], record["target"]) for record in records if record["seed"] == seed}
    return [(m, t) for t in options.targets for m in options.methods if (m, t) not in done]


def table(records: list[Record]) -> str:
    """Markdown: a line per target and method, means ± standard errors over seeds."""
    lines = [
        f"| target | method | {' | '.join(COLUMNS.values())} | CPU s | seeds |",
        "|---" * (len(COLUMNS) + 4) + "|",
    ]
    for name in TARGETS:
        for method, (title, _) in METHODS.items():
            rows = [r for r in records if (r["target"], r["method"]) == (name, method)]
            if rows:
                cells = [mean_and_error([row[score] for row in rows]) for score in COLUMNS]
                seconds = statistics.mean(row["cpu_seconds"] for row in rows)
                lines.append(f"| {name} | {title} | {' | '.join(cells)} | {seconds:.0f} | {len(rows)} |")
    return "\n".join(lines)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--pretrain-epochs", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--shots", type=int, default=SHOTS, help="labelled images of each class")
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true")
    return parser.parse_args(arguments)


def _without_absent_peer(methods: list[str]) -> list[str]:
    if PEER in methods and find_spec("laplace") is None:
        print("laplace-torch is left out: it is not installed. pip install -e '.[bench]' brings it.")
        return [method for method in methods if method != PEER]
    return methods


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, seed by seed, keep it, print the table."""
    options = _options(arguments)
    options.methods = _without_absent_peer(options.methods)
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    records: list[Record] = known.get("runs", [])
    if not options.table:
        _refuse_other_settings(options, known)
    for seed in range(0 if options.table else options.seeds):
        _one_seed(options.first_seed + seed, options, records)
    print(table(records))


def _one_seed(seed: int, options: argparse.Namespace, records: list[Record]) -> None:
    todo = missing(options, records, seed)
    weights = pretrain(digits(options.root), seed, options.pretrain_epochs) if todo else {}
    for method, name in todo:
        records.append(run(method, name, seed, weights, options))
        last = ", ".join(f"{score} {records[-1][score]:.4f}" for score in COLUMNS)
        print(f"{name} {method} seed {seed}: {last} ({records[-1]['cpu_seconds']} s)", flush=True)
        if options.json:
            options.json.write_text(json.dumps(_content(options, records), indent=1) + "\n")


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("pretrain_epochs", "epochs", "shots", "validate")}


def _refuse_other_settings(options: argparse.Namespace, known: dict[str, Any]) -> None:
    asked = _settings(options)
    other = [
        f"{name}={known[name]} (asked: {value})" for name, value in asked.items() if known.get(name, value) != value
    ]
    if other:
        raise HyperparameterError(f"{options.json} holds runs with {', '.join(other)}. Name another file.")


def _content(options: argparse.Namespace, records: list[Record]) -> dict[str, Any]:
    return {**provenance(), **_settings(options), "runs": records}


if __name__ == "__main__":
    main()
