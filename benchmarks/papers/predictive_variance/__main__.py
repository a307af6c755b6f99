"""Correlation of predictive variances with those of Hamiltonian Monte Carlo, Zhang et al. 2018, Table 4.

    python -m benchmarks.papers.predictive_variance --root UCI [--sets boston yacht] [--epochs 20000] [--trials 10]
        [--samples 2000] [--json FILE]

In each trial a network with 10 hidden units trains on 20 rows and predicts the variance at 100 others. The correlation with
the variance of NUTS over these rows is averaged over 10 trials. NUTS is numpyro's, in the extra `bench`; the agreement
between two halves of its chains shows how exact it is. JSON is written after each set; finished sets are skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.papers.predictive_variance.approximations import LEARNERS, PUBLISHED, variances
from benchmarks.papers.predictive_variance.hmc import Chains, reference
from benchmarks.papers.predictive_variance.report import Row, correlations, promises, table, title
from benchmarks.papers.predictive_variance.trials import load_trials
from benchmarks.papers.uci.data import Splits
from benchmarks.papers.uci.published import SETS
from benchmarks.papers.uci.setting import Setting
from benchmarks.provenance import save_json


def measure(name: str, trials: Splits, setting: Setting, chains: Chains) -> list[Row]:
    """Sample and train on one set; one row for NUTS compared with itself, and one per method."""
    start = time.perf_counter()
    truth = reference(trials, setting.num_hidden, setting.prior_precision, chains)
    rows: list[Row] = []

    def record(method: str, variance: torch.Tensor, expected: torch.Tensor) -> None:
        nonlocal start
        values, now = correlations(variance, expected), time.perf_counter()
        rows.append(
            {
                "set": name,
                "method": method,
                **(asdict(chains) if method == "nuts" else {"epochs": setting.epochs}),
                "seconds": now - start,
                "correlations": values.tolist(),
            }
        )
        print(f"{name}, {title(method)}: {values.mean():.3f}, {now - start:.0f} s", flush=True)
        start = now

    record("nuts", *truth.halves)
    for method in LEARNERS:
        record(method, variances(method, trials, setting), truth.variances)
    return rows


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the UCI sets")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=PUBLISHED.epochs)
    parser.add_argument("--warm-up", type=int, default=Chains.warm_up, help="discarded steps per chain")
    parser.add_argument("--samples", type=int, default=Chains.samples, help="samples per chain")
    parser.add_argument("--chains", type=int, default=Chains.chains)
    parser.add_argument("--json", type=Path, help="written after each set; finished sets are skipped")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Measure the missing sets, and print the table."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("numpyro") is None:
        parser.error("the reference needs numpyro: pip install 'lightning-bayes[bench]'")
    if options.chains < 2:
        parser.error(f"--chains {options.chains}: at least 2 are needed, to compare one half with the other")
    torch.set_num_threads(1)
    setting = replace(PUBLISHED, epochs=options.epochs)
    chains = Chains(options.chains, options.warm_up, options.samples)
    rows: list[Row] = []
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text("utf-8"))["results"]
    for name in options.sets:
        if not any(row["set"] == name for row in rows):
            rows += measure(name, load_trials(options.root, name, options.trials), setting, chains)
            header = {"numpyro": version("numpyro"), "setting": asdict(setting)}
            save_json(options.json, {**header, "results": rows})
    print(table(rows))
    print("\n".join(f"- {line}" for line in promises(rows)))


if __name__ == "__main__":
    main()
