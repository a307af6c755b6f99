"""The demo over several seeds: means, standard errors, and the criteria that the default arguments must meet.

python -m benchmarks.demo_seeds [--first-seed 0] [--seeds 5] [--json benchmarks/results/demo_seeds.json]
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.over_seeds import mean_and_error, standard_error
from benchmarks.provenance import save_json
from lightning_bayes.cli.demo import COLUMNS, compare

Runs = dict[str, dict[str, list[float]]]  # evaluation → metric → one value per seed
VERDICTS = {True: "kept", False: "BROKEN", None: "unknown"}


def collect(seeds: Sequence[int]) -> Runs:
    """Run the demo once per seed."""
    runs: Runs = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            results, _, _ = compare(Path(folder), seed)
        for name, result in results.items():
            for metric in COLUMNS.values():
                runs.setdefault(name, {}).setdefault(metric, []).append(result[metric])
        accuracies = [f"{name} {result['cls/Acc']:.4f}" for name, result in results.items()]
        print(f"seed {seed}: {', '.join(accuracies)}", flush=True)
    return runs


def criteria(runs: Runs) -> dict[str, bool | None]:
    """Whether the Monte-Carlo predictive with default arguments meets each criterion; None if one seed cannot tell."""
    adam, sampled = runs["Adam"], list(runs.values())[-1]
    ece_gap = statistics.mean(sampled["cal/ECE"]) - statistics.mean(adam["cal/ECE"])
    ece_error = (standard_error(sampled["cal/ECE"]) ** 2 + standard_error(adam["cal/ECE"]) ** 2) ** 0.5
    is_decided = ece_gap <= 0 or not math.isnan(ece_error)
    return {
        "mean accuracy at least 97 %": statistics.mean(sampled["cls/Acc"]) >= 0.97,
        "mean NLL no worse than Adam's": statistics.mean(sampled["cls/NLL"]) <= statistics.mean(adam["cls/NLL"]),
        "ECE no worse within two standard errors": ece_gap <= max(0, 2 * ece_error) if is_decided else None,
        "no run below 90 %": min(sampled["cls/Acc"]) > 0.9,
    }


def main() -> None:
    """Print the table and the criteria; write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = collect(seeds)
    print(f"{'':18}" + "".join(f"{column:>20}" for column in COLUMNS))
    for name, metrics in runs.items():
        cells = (mean_and_error(metrics[metric]) for metric in COLUMNS.values())
        print(f"{name:18}" + "".join(f"{cell:>20}" for cell in cells))
    for promise, kept in criteria(runs).items():
        print(f"{VERDICTS[kept]:7}  {promise}")
    save_json(options.json, {"seeds": list(seeds), "runs": runs})


if __name__ == "__main__":
    main()
