"""CIFAR-10 compared with Table 1 of Osawa et al. 2019: all metrics of each method at equal epochs.

    python -m benchmarks.papers.cifar10 --root DATA --model lenet --epochs 210 --ood svhn --work FOLDER --json FILE
        [--methods adam vogn] [--settings published] [--minutes 9]
    python -m benchmarks.papers.cifar10 --json benchmarks/results/cifar10.json --table

Runs that are already in the JSON file are skipped. A run goes on from its checkpoint in the work folder; with ``--minutes``
the program stops after the epoch in which they are over. ``--settings`` takes the callbacks' defaults on Adam at 1e-3
(``default``), the same with the paper's weight decay (``l2``), or what Osawa et al. released (``published``; Zhang et al.
for Noisy K-FAC on VGG16). The table also has each predictive with one temperature: fitted on every second test image and
scored on the others, and the reverse, averaged.

On one core, an epoch of LeNet-5 takes 5 to 15 s with the default settings, and a minute with VOGN as published, which has
six weight samples an update; an epoch of AlexNet takes minutes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.over_seeds import mean_and_error
from benchmarks.papers import PUBLISHED
from benchmarks.papers.cifar10.networks import METHODS, NETWORKS, why_not
from benchmarks.papers.cifar10.runs import Machine, Run, train_and_test
from benchmarks.provenance import provenance, save_json, saved_rows
from benchmarks.resuming import Unfinished
from lightning_bayes.errors import BayesError

# Logged name → column; AUROC is that of misclassification detection.
COLUMNS: Final = {
    "test/cls/Acc": "accuracy ↑",
    "test/cls/NLL": "NLL ↓",
    "test/cal/ECE": "ECE ↓",
    "test/mis/AUROC": "AUROC ↑",
    "ood/AUROC": "OOD AUROC ↑",
    "tempered/cls/NLL": "with one T: NLL ↓",
    "tempered/cal/ECE": "ECE ↓",
    "tempered/temperature": "T",
}
Record = dict[str, Any]  # result of `runs.train_and_test`, as stored in JSON


def table(records: list[Record]) -> str:
    """Format a Markdown table: for each model, means ± standard errors over seeds, then the published rows."""
    head = ["model", "method", "settings", *COLUMNS.values(), "epochs", "s/epoch", "seeds"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for model, augment in product(NETWORKS, (False, True)):
        group = [r for r in records if (r["model"], r["augment"]) == (model, augment)]
        name = f"{model}, {'augmented' if augment else 'not augmented'}"
        lines += [f"| {name} | {line}" for line in _measured(group)]
        lines += [f"| {name} | {_published(row)}" for row in PUBLISHED["cifar10"].get(name, ()) if group]
    return "\n".join(lines)


def _measured(records: list[Record]) -> Iterator[str]:
    groups: dict[tuple[str, str, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record["method"], record["settings"], record["epochs"]), []).append(record)
    order = list(METHODS)
    for (method, settings, epochs), group in sorted(
        groups.items(), key=lambda item: (item[0][1:], order.index(item[0][0]))
    ):
        cells = [_cell([r["metrics"].get(name, math.nan) for r in group]) for name in COLUMNS]
        cpu = statistics.mean(r["cpu_seconds"] for r in group)
        yield f"{METHODS[method]} | {settings} | {' | '.join(cells)} | {epochs} | {cpu:.1f} | {len(group)} |"


def _cell(values: list[float]) -> str:
    return "–" if any(map(math.isnan, values)) else mean_and_error(values)


def _published(row: Record) -> str:
    scores = [row[name] for name in ("accuracy", "nll", "ece", "auroc")]
    cells = ["–" if value is None else f"{value:.4g}" for value in (*scores, None, None, None, None)]
    return f"*{row['method']}* | *{row['source']}* | {' | '.join(cells)} | {row['epochs'] or '–'} | – | – |"


def asked(options: argparse.Namespace) -> Iterator[Run]:
    """All requested runs. One seed of all methods is finished before the next seed starts."""
    augment = NETWORKS[options.model].augment if options.augment is None else options.augment
    for seed, method in product(range(options.first_seed, options.first_seed + options.seeds), options.methods):
        yield Run(options.model, method, options.settings, augment, options.epochs, seed)


def execute(run: Run, machine: Machine, runs: list[Record]) -> str:
    """Execute a run, store its result, and describe it, or the reason why it did not run, in one line."""
    if reason := why_not(run.model, run.method, run.settings):
        return f"not run: {reason}"
    try:
        record = train_and_test(run, machine)
    except BayesError as error:
        return f"not run: {type(error).__name__}: {error}"
    runs.append({**record, "device": _device(machine.accelerator), "commit": provenance()["commit"]})
    return ", ".join(f"{name} {record['metrics'][name]:.4f}" for name in COLUMNS if name in record["metrics"])


def _device(accelerator: str) -> str:
    on_gpu = accelerator != "cpu" and torch.cuda.is_available()
    return torch.cuda.get_device_name() if on_gpu else f"cpu, {torch.get_num_threads()} threads"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--model", choices=NETWORKS, default="lenet")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--settings", choices=["default", "l2", "published"], default="default")
    parser.add_argument("--augment", action=argparse.BooleanOptionalAction, help="crops and mirroring; as in the paper")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--ood", nargs="*", default=[], help="svhn, or folders of images")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--device", help="keep and augment the training images there, such as cuda")
    parser.add_argument("--work", type=Path, help="folder of the checkpoints from which unfinished runs go on")
    parser.add_argument("--minutes", type=float, help="stop after the epoch in which they are over")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, save it, and print the table."""
    options = _options(arguments)
    runs: list[Record] = saved_rows(options.json, "runs")
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    reading = str(options.root), tuple(options.ood), options.accelerator, options.num_workers
    machine = Machine(*reading, options.work, deadline, options.device)
    for run in [] if options.table else asked(options):
        if any(run._asdict().items() <= known.items() for known in runs):
            continue
        try:
            done = execute(run, machine, runs)
        except Unfinished as stopped:
            print(f"{run.name}: {stopped}; run the command again")
            break
        print(f"{run.name}: {done}", flush=True)
        save_json(options.json, {"runs": runs})
    print(table(runs))


if __name__ == "__main__":
    main()
