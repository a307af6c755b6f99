"""Correlation of predictive variances with those of Hamiltonian Monte Carlo, Zhang et al. 2018, Table 4.

    python -m benchmarks.papers.predictive_variance --root UCI [--sets boston yacht] [--epochs 20000] [--trials 10]
        [--samples 2000] [--json FILE]

In each trial a network of 10 hidden units is trained on 20 rows, and asked for its variance at 100 others; the correlation
over these with the variance of NUTS is averaged over 10 trials. NUTS is numpyro's, of the extra `bench`; how far one half of
its chains agrees with the other says how exact it is. JSON is written after each set; sets that it holds are not run again.
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
from benchmarks.provenance import provenance


def measure(name: str, trials: Splits, setting: Setting, chains: Chains) -> list[Row]:
    """Sample and train on one set.

    Args:
        name: The set.
        trials: Its trials.
        setting: Of the variational methods.
        chains: Of NUTS.

    Returns:
        One row for NUTS against itself, and one for every method.
    """
    start = time.perf_counter()
    truth = reference(trials, setting.num_hidden, setting.prior_precision, chains)
    rows: list[Row] = []

    def keep(method: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        nonlocal start
        values, now = correlations(found, expected), time.perf_counter()
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

    keep("nuts", *truth.halves)
    for method in LEARNERS:
        keep(method, variances(method, trials, setting), truth.variances)
    return rows


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the UCI sets")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=PUBLISHED.epochs)
    parser.add_argument("--warm-up", type=int, default=Chains.warm_up, help="steps of each chain that are dropped")
    parser.add_argument("--samples", type=int, default=Chains.samples, help="steps of each chain that are kept")
    parser.add_argument("--chains", type=int, default=Chains.chains)
    parser.add_argument("--json", type=Path, help="written after each set, and resumed from")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Measure the sets that are missing, and print the table."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("numpyro") is None:
        parser.error("the reference needs numpyro: pip install 'lightning-bayes[bench]'")
    if options.chains < 2:
        parser.error(f"--chains {options.chains}: one half of the chains is compared with the other, so at least 2")
    torch.set_num_threads(1)
    setting = replace(PUBLISHED, epochs=options.epochs)
    chains = Chains(options.chains, options.warm_up, options.samples)
    rows: list[Row] = []
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text("utf-8"))["results"]
    for name in options.sets:
        if not any(row["set"] == name for row in rows):
            rows += measure(name, load_trials(options.root, name, options.trials), setting, chains)
            if options.json:
                kept = {**provenance(), "numpyro": version("numpyro"), "setting": asdict(setting), "results": rows}
                options.json.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    print(table(rows))
    print("\n".join(f"- {line}" for line in promises(rows)))


if __name__ == "__main__":
    main()
