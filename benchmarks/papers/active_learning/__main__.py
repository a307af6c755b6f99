"""Active learning on regressions, Zhang et al. 2018, Table 3.

    python -m benchmarks.papers.active_learning --root UCI [--sets boston yacht] [--methods noisy_kfac] [--trials 40]
        [--epochs 1000] [--mc-samples 10] [--samples 1000] [--json FILE] [--figure FILE]

In each trial a network with 10 hidden units starts with 20 labelled rows. After each of 10 fits from scratch, one row of the
pool is labelled: the row with the largest predictive variance (active, suffix A in the paper) or a random row (suffix R).
JSON is written after each set and method; finished ones are skipped. The paper trains for 20 000 epochs and does not state
the number of weight samples per step.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch

from benchmarks.papers.active_learning.figure import draw
from benchmarks.papers.active_learning.published import SETS
from benchmarks.papers.active_learning.report import Row, last, promises, table
from benchmarks.papers.active_learning.rounds import FITS, METHODS, SETTING, errors
from benchmarks.papers.active_learning.trials import Trials
from benchmarks.provenance import provenance
from lightning_bayes.zoo.data.uci import read_uci


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the UCI sets")
    parser.add_argument("--sets", nargs="+", default=["boston", "concrete", "energy", "yacht"], choices=SETS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--fits", type=int, default=FITS)
    parser.add_argument("--samples", type=int, default=SETTING.eval_samples, help="weight samples per prediction")
    parser.add_argument(
        "--mc-samples", type=int, default=SETTING.mc_samples[0], help="weight samples per training step"
    )
    parser.add_argument("--json", type=Path, help="written after each set and method; finished ones are skipped")
    parser.add_argument("--figure", type=Path)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing, and print the table."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.trials < 2:
        parser.error(f"--trials {options.trials}: a standard error over trials needs at least 2")
    torch.set_num_threads(1)
    samples = (options.mc_samples, options.mc_samples)
    setting = replace(SETTING, epochs=options.epochs, mc_samples=samples, eval_samples=options.samples)
    rows: list[Row] = []
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text("utf-8"))["results"]
    done = {(row["set"], row["method"]) for row in rows}
    for name, method in product(options.sets, options.methods):
        if (name, method) in done:
            continue
        start = time.perf_counter()
        rmse = errors(method, Trials.draw(read_uci(options.root, name), options.trials), setting, options.fits)
        seconds = time.perf_counter() - start
        rows.append({"set": name, "method": method, "seconds": seconds, "rmse": rmse.tolist()})
        print(f"{name}, {method}: random, active {last(rows[-1])[:2]}, {seconds:.0f} s", flush=True)
        if options.json:
            content = {**provenance(), "setting": asdict(setting), "results": rows}
            options.json.write_text(json.dumps(content) + "\n", "utf-8")
    if options.figure:
        draw(rows, options.figure)
    print(table(rows))
    print("\n".join(f"- {line}" for line in promises(rows)))


if __name__ == "__main__":
    main()
