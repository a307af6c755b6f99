"""Noisy K-FAC with both engines: error and NLL on digits (LeNet) and a UCI set (MLP), paired by seed.

    python -m benchmarks.engines --root DATA [--sets digits energy] [--steps default natural] [--seeds 3] [--epochs 20]
        [--sources fused "backpack kfac" "backpack kflr"] [--json FILE]

DATA is the folder of `benchmarks.defaults`; the digits come with scikit-learn. A seed fixes the split, the initial weights,
the batch order and the noise, so runs are paired. A difference is significant if it exceeds two standard errors over seeds.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.defaults.problems import PROBLEMS, Data, Problem
from benchmarks.defaults.scores import classification_scores, regression_scores
from benchmarks.defaults.verdict import paired
from benchmarks.over_seeds import with_error
from benchmarks.provenance import save_json
from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes import NoisyKFACCallback
from lightning_bayes.curvature import Gaussian, Likelihood, Softmax
from lightning_bayes.predictive import PosteriorSamples

SETS = ("digits", "energy")
SOURCES: Mapping[str, Mapping[str, Any]] = {  # arguments of the callback
    "fused": {},
    "backpack kfac": {"engine": "backpack", "factors": "kfac"},
    "backpack kflr": {"engine": "backpack", "factors": "kflr"},
}
STEPS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "natural": {"lr": 0.05, "kl_clip": 1e-3, "relative_noise": 0.3},
}
EVAL_SAMPLES = 20
ROUNDING = 1e-6  # differences between equal factors in single precision


class Learner(LightningModule):
    """A module with Adam and cross-entropy or mean squared error, which BackPACK supports."""

    def __init__(self, problem: Problem, data: Data) -> None:
        super().__init__()
        self.net, self.is_regression = problem.network(data), problem.is_regression
        self.likelihood: Likelihood = Gaussian(0.5**0.5) if problem.is_regression else Softmax()

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, classes]``, or means ``[batch, 1]``."""
        outputs: Tensor = self.net(x)
        return outputs

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The mean loss."""
        x, y = batch
        return F.mse_loss(self(x), y[:, None]) if self.is_regression else F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def run(name: str, data: Data, source: str, step: str, seed: int, epochs: int) -> dict[str, float]:
    """Train once and score the test set.

    Args:
        name: Key of `PROBLEMS`.
        data: Its data.
        source: Key of `SOURCES`.
        step: Key of `STEPS`.
        seed: Seed of weights, batch order and noise.
        epochs: Number of epochs.

    Returns:
        ``error``, ``nll``, ``calibration`` and training ``seconds``.
    """
    problem = PROBLEMS[name]
    seed_everything(seed, verbose=False)
    module = Learner(problem, data)
    loader = DataLoader(TensorDataset(data.train_x, data.train_y), batch_size=problem.batch, shuffle=True)
    callback = NoisyKFACCallback(**{"seed": seed, **SOURCES[source], **STEPS[step]})
    start = time.perf_counter()
    with quiet():
        quiet_trainer([callback], epochs).fit(module, loader)
    seconds = time.perf_counter() - start
    return {**_scores(module.eval(), callback, data), "seconds": seconds}


@torch.no_grad()
def _scores(module: Learner, callback: NoisyKFACCallback, data: Data) -> dict[str, float]:
    assert callback.optimizer is not None
    samples = PosteriorSamples(callback.optimizer.posterior(), EVAL_SAMPLES)
    outputs = samples.outputs(module, lambda: module(data.test_x))
    if not module.is_regression:
        return classification_scores(outputs, data.test_y)
    residuals = samples.outputs(module, lambda: module(data.train_x))[..., 0] - data.train_y
    log_std = residuals.square().mean().sqrt().log().expand_as(outputs)  # noise estimated on the training set
    return regression_scores(torch.cat([outputs, log_std], -1), data.test_y)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Format the scores with this package's factors, and the paired differences with BackPACK's, as Markdown."""
    lines = ["| set | step | factors | error | NLL | Δ error ± s.e. | Δ NLL ± s.e. | within 2 s.e. |", "|" + "---|" * 8]
    for row in results:
        base = next(r for r in results if (r["set"], r["step"], r["source"]) == (row["set"], row["step"], "fused"))
        differences = [paired(row["runs"], base["runs"], name) for name in ("error", "nll")]
        means = [sum(run[name] for run in row["runs"]) / len(row["runs"]) for name in ("error", "nll")]
        cells = [f"{mean:.4f}" for mean in means]
        if row is base:
            cells += ["", "", ""]
        else:
            cells += [with_error(mean, error, sign="+") for mean, error in differences]
            cells += [", ".join(_within(mean, error) for mean, error in differences)]
        lines.append("| " + " | ".join([row["set"], row["step"], row["source"], *cells]) + " |")
    return "\n".join(lines)


def _within(mean: float, error: float) -> str:
    """Whether a difference is at most two standard errors from 0; a dash for one seed, whose error is unknown."""
    if math.isnan(error):
        return "–"
    return "yes" if abs(mean) <= 2 * error + ROUNDING else "no"


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS)
    parser.add_argument("--sources", nargs="+", default=list(SOURCES), choices=SOURCES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    """Run, print the table, and save the scores of every seed."""
    arguments = make_parser().parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    results: list[dict[str, Any]] = []
    for name in arguments.sets:
        data = {seed: PROBLEMS[name].load(arguments.root, seed) for seed in seeds}
        for step in arguments.steps:
            for source in arguments.sources:
                runs = [run(name, data[seed], source, step, seed, arguments.epochs) for seed in seeds]
                results.append({"set": name, "step": step, "source": source, "runs": runs})
                print(name, step, source, [{k: round(v, 4) for k, v in one.items()} for one in runs], flush=True)
                save_json(arguments.json, {"seeds": list(seeds), "epochs": arguments.epochs, "results": results})
    print(table(results))


if __name__ == "__main__":
    main()
