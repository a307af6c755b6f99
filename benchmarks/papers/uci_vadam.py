"""UCI regression with Vadam, Khan et al. 2018, Table 1: noise and prior precision tuned by Bayesian optimisation.

    python -m benchmarks.papers.uci_vadam --root UCI --json benchmarks/results/uci_vadam.json [--sets boston yacht]
        [--methods vadam vogn] [--tune 30] [--epochs 40]

Network, epochs, batches, weight samples, bounds and optimisation are those of the paper's Appendix J and code: 5 random and
25 chosen pairs (expected improvement under a Gaussian process with a Matérn kernel), each scored by five folds. The paper
tunes on each split; here split 0 of a set is tuned, and its pair is used for all 20 splits. All folds and all splits of a
set train at once. JSON is written after each pair and each set; a run with an existing file continues it.

The paper tunes and reports the joint log-likelihood of all test rows under one weight sample, divided by the number of rows
(`joint`). Its MC-dropout column, from another paper, is the mean of each row's own (`log_likelihood`). Both are measured.
Needs scikit-learn. On one core, the eight sets take about five minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.over_seeds import mean_and_error, with_error
from benchmarks.papers import PUBLISHED
from benchmarks.papers.regression.data import KHAN, Setting, Splits, load_splits, stack_splits
from benchmarks.papers.regression.learner import FixedPrecision, Problem
from benchmarks.papers.regression.mean_field import ALGORITHMS, MeanFieldLearner
from benchmarks.papers.uci import SETS
from benchmarks.provenance import save_json
from lightning_bayes.zoo.data.uci import read_uci

RANDOM: Final = 5  # pairs before the Gaussian process chooses
FOLDS: Final = 5
Row = dict[str, Any]
Pair = list[float]  # log τ of the noise, log δ of the prior


def bounds(name: str) -> NDArray[np.float64]:
    """Bounds of (log τ, log δ) in the authors' code."""
    return np.array([[1.0, 5.0], [-3.0, 4.0]] if name in {"naval", "power"} else [[0.0, 5.0], [-4.0, 4.0]])


def folds(root: Path, name: str) -> Splits:
    """Five folds of the training rows of split 0, each standardised by its own training rows."""
    stored = read_uci(root, name)
    rows = stored.splits[0][0]  # in random order
    parts = rows[: len(rows) // FOLDS * FOLDS].chunk(FOLDS)
    rest = [torch.cat([part for part in parts if part is not held_out]) for held_out in parts]
    return stack_splits(stored, list(zip(rest, parts, strict=True)))


@torch.no_grad()
def scores(method: str, splits: Splits, setting: Setting, pair: Pair) -> dict[str, Tensor]:
    """RMSE, joint and per-point test log-likelihood of every split, ``[R]``, in the units of the data."""
    noise, prior = (math.exp(value) for value in pair)
    precision = FixedPrecision(torch.full_like(splits.target_std, noise))
    setting = replace(setting, prior_precision=prior)
    problem = Problem(splits, setting, torch.Generator().manual_seed(123), precision)
    learner = MeanFieldLearner(problem, ALGORITHMS[method])
    learner.train()
    samples = [learner.predict(splits.test.inputs) - splits.test.targets for _ in range(setting.eval_samples)]
    residuals, unit = torch.stack(samples), splits.target_std
    joint, per_point = (value - unit.log() for value in log_likelihoods(precision.log_density(residuals)))
    return {"rmse": residuals.mean(0).square().mean(1).sqrt() * unit, "joint": joint, "log_likelihood": per_point}


def log_likelihoods(density: Tensor) -> tuple[Tensor, Tensor]:
    """Joint, divided by the number of rows, and mean of each row's own, ``[R]``, from log-densities ``[S, R, m]``."""
    count, rows = math.log(len(density)), density.shape[2]
    return (density.sum(2).logsumexp(0) - count) / rows, (density.logsumexp(0) - count).mean(1)


def next_pair(tried: list[Pair], values: list[float], box: NDArray[np.float64]) -> Pair:
    """The pair of largest expected improvement; random before there are five."""
    random = np.random.default_rng(len(tried))
    candidates = random.uniform(box[:, 0], box[:, 1], (10_000, 2))
    if len(tried) < RANDOM:
        return [float(value) for value in candidates[0]]
    from scipy.stats import norm
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern

    kernel = Matern(length_scale=[1.0, 2.0], nu=2.5)
    process = GaussianProcessRegressor(kernel, alpha=1e-2, n_restarts_optimizer=5, random_state=0)
    known = np.array(values)
    process.fit(np.array(tried), known)
    mean, std = process.predict(candidates, return_std=True)
    above = mean - known.max()
    improvement = above * norm.cdf(above / std) + std * norm.pdf(above / std)
    return [float(value) for value in candidates[improvement.argmax()]]


def tune(row: Row, data: Splits, setting: Setting, count: int) -> Iterator[None]:
    """Try pairs until there are `count`; the row keeps them with their mean joint log-likelihood over folds."""
    while len(row["tried"]) < count:
        pair = next_pair(row["tried"], row["values"], bounds(row["set"]))
        joint = scores(row["method"], data, setting, pair)["joint"].nan_to_num(-1e3).clamp_min(-1e3)
        row["tried"].append(pair)
        row["values"].append(float(joint.mean()))
        yield


def run(row: Row, root: Path, setting: Setting, count: int) -> Iterator[None]:
    """Tune on split 0, then score all splits; yields after each fit, with the result so far in the row."""
    start = time.process_time() - row["seconds"]
    for _ in tune(row, folds(root, row["set"]), setting, count):
        row["seconds"] = time.process_time() - start
        yield
    row["pair"] = row["tried"][int(np.argmax(row["values"]))]
    found = scores(row["method"], load_splits(root, row["set"]), setting, row["pair"])
    row |= {name: values.tolist() for name, values in found.items()}
    row["seconds"] = time.process_time() - start
    yield


def table(rows: list[Row]) -> str:
    """Format a Markdown table of means ± standard errors over splits beside Table 1 of the paper."""
    published = PUBLISHED["khan2018_table1"]
    lines = [
        "| set | method | RMSE | published | joint log-likelihood | published | per point | τ | δ |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in sorted((row for row in rows if "rmse" in row), key=lambda row: SETS.index(row["set"])):
        cells = [mean_and_error(row[name]) for name in ("rmse", "joint", "log_likelihood")]
        ours = row["method"] in published["rmse"]
        names = ("rmse", "log_likelihood")
        rmse, joint = (with_error(*published[n][row["method"]][row["set"]], digits=2) if ours else "–" for n in names)
        chosen = " | ".join(f"{math.exp(value):.3g}" for value in row["pair"])
        lines.append(
            f"| {row['set']} | {row['method']} | {cells[0]} | {rmse} | {cells[1]} | {joint} | {cells[2]} | {chosen} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the UCI sets")
    parser.add_argument(
        "--sets", nargs="*", default=["yacht", "boston", "energy", "concrete", *SETS[3:7]], choices=SETS
    )
    parser.add_argument("--methods", nargs="+", default=["vadam"], choices=["vadam", "vogn"])
    parser.add_argument("--tune", type=int, default=30, help="pairs to try")
    parser.add_argument("--epochs", type=int, default=KHAN.epochs)
    parser.add_argument("--json", type=Path, help="written after each pair, and continued")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    setting = replace(KHAN, epochs=options.epochs)
    rows: list[Row] = []
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text("utf-8"))["results"]
    for method in options.methods:
        for name in options.sets:
            key = {"set": name, "method": method, "epochs": options.epochs, "tune": options.tune}
            row = next((row for row in rows if key.items() <= row.items()), None)
            if row is None:
                rows.append(row := {**key, "tried": [], "values": [], "seconds": 0.0})
            for _ in run(row, options.root, setting, options.tune) if "rmse" not in row else ():
                save_json(options.json, {"results": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
