"""LeNet-5 trained on MNIST digits, adapted to clothing and to letters with 1000 labelled images.

    python -m benchmarks.finetune --root DATA [--seeds 3] [--json benchmarks/results/finetune.json] [--table]

Runs that are already in the JSON file are skipped; a file with other settings is refused. `--table` only prints the file.
`--validate` evaluates on further images of the training pool instead of the test images, to choose settings.
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
from benchmarks.provenance import save_json
from lightning_bayes.errors import HyperparameterError

# Score → column of the table. The arrow points in the better direction.
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
    test_scores = scores(predict, images.test, unfamiliar(name, options.root))
    return {"target": name, "method": method, "seed": seed, **test_scores, "cpu_seconds": seconds}


def missing(options: argparse.Namespace, records: list[Record], seed: int) -> list[tuple[str, str]]:
    """The requested methods and targets without a record."""
    done = {(record["method"], record["target"]) for record in records if record["seed"] == seed}
    return [(m, t) for t in options.targets for m in options.methods if (m, t) not in done]


def table(records: list[Record]) -> str:
    """Format a Markdown table: one line per target and method, means ± standard errors over seeds."""
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
    parser.add_argument("--shots", type=int, default=SHOTS, help="labelled images per class")
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true")
    return parser.parse_args(arguments)


def _without_absent_peer(methods: list[str]) -> list[str]:
    if PEER in methods and find_spec("laplace") is None:
        print("laplace-torch is not installed and is left out; pip install -e '.[bench]' installs it.")
        return [method for method in methods if method != PEER]
    return methods


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, seed by seed, save it, and print the table."""
    options = _options(arguments)
    options.methods = _without_absent_peer(options.methods)
    saved = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    records: list[Record] = saved.get("runs", [])
    if not options.table:
        _refuse_other_settings(options, saved)
    for seed in range(0 if options.table else options.seeds):
        _one_seed(options.first_seed + seed, options, records)
    print(table(records))


def _one_seed(seed: int, options: argparse.Namespace, records: list[Record]) -> None:
    pending = missing(options, records, seed)
    weights = pretrain(digits(options.root), seed, options.pretrain_epochs) if pending else {}
    for method, name in pending:
        record = run(method, name, seed, weights, options)
        records.append(record)
        values = ", ".join(f"{score} {record[score]:.4f}" for score in COLUMNS)
        print(f"{name} {method} seed {seed}: {values} ({record['cpu_seconds']} s)", flush=True)
        save_json(options.json, {**_settings(options), "runs": records})


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("pretrain_epochs", "epochs", "shots", "validate")}


def _refuse_other_settings(options: argparse.Namespace, saved: dict[str, Any]) -> None:
    different = [
        f"{name}={saved[name]} (requested: {value})"
        for name, value in _settings(options).items()
        if saved.get(name, value) != value
    ]
    if different:
        raise HyperparameterError(f"{options.json} has runs with {', '.join(different)}. Choose another file.")


if __name__ == "__main__":
    main()
