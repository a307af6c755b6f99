"""CIFAR-10 compared with Table 1 of Osawa et al. 2019: all metrics of each method at equal epochs.

    python -m benchmarks.papers.cifar10 --root DATA --model lenet --epochs 30 [--methods adam vogn] [--ood svhn]
        [--settings published] [--json benchmarks/results/cifar10.json]
    python -m benchmarks.papers.cifar10 --json benchmarks/results/cifar10.json --table

Runs that are already in the JSON file are skipped. The file also lists the methods that were not run, the reason for each
failed run, and the text of --note.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.papers.cifar10.methods import METHODS, why_not
from benchmarks.papers.cifar10.networks import NETWORKS
from benchmarks.papers.cifar10.report import COLUMNS, not_run, table
from benchmarks.papers.cifar10.training import Run, train_and_test
from benchmarks.provenance import provenance, save_json
from lightning_bayes.errors import BayesError

Results = dict[str, Any]  # content of the JSON file


def asked(options: argparse.Namespace) -> Iterator[Run]:
    """All requested runs. One seed of all methods is finished before the next seed starts."""
    augment = NETWORKS[options.model].augment if options.augment is None else options.augment
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for method in options.methods:
            yield Run(options.model, method, options.settings, augment, options.epochs, seed)


def execute(run: Run, options: argparse.Namespace, results: Results) -> str:
    """Execute a run, store its result or the reason of its failure, and describe it in one line."""
    reason = why_not(run.model, run.method, run.settings)
    try:
        if not reason:
            record = train_and_test(
                run, str(options.root), tuple(options.ood), options.accelerator, options.num_workers
            )
            source = {"device": _device(options.accelerator), "commit": provenance()["commit"]}
            results["runs"].append({**record, **source})
    except BayesError as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        results["failed"] = [failure for failure in results["failed"] if failure["run"] != run._asdict()]
        results["failed"].append({"run": run._asdict(), "why": reason})
        return f"not run: {reason}"
    metrics = results["runs"][-1]["metrics"]
    return ", ".join(f"{name} {metrics[name]:.4f}" for name in COLUMNS if name in metrics)


def _device(accelerator: str) -> str:
    on_gpu = accelerator != "cpu" and torch.cuda.is_available()
    return torch.cuda.get_device_name() if on_gpu else f"cpu, {torch.get_num_threads()} threads"


def _is_known(run: Run, results: Results) -> bool:
    return any(all(known[key] == value for key, value in run._asdict().items()) for known in results["runs"])


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--model", choices=NETWORKS, default="lenet")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--settings", choices=["default", "published"], default="default")
    parser.add_argument("--augment", action=argparse.BooleanOptionalAction, help="crops and mirroring; as in the paper")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--ood", nargs="*", default=[], help="svhn, or folders of images")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--note", help="saved with the results: budget, and what was not run and why")
    parser.add_argument("--table", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, save it, and print the table."""
    options = _options(arguments)
    saved = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    results: Results = {"runs": saved.get("runs", []), "failed": saved.get("failed", [])}
    for run in [] if options.table else asked(options):
        if _is_known(run, results):
            continue
        print(f"{run.model} {run.method} seed {run.seed}: {execute(run, options, results)}", flush=True)
        note = options.note or saved.get("note", "")
        save_json(options.json, {"note": note, **results, "not_run": not_run(results["runs"])})
    print(table(results["runs"]))


if __name__ == "__main__":
    main()
