"""Active learning on images: a LeNet-5 selects images of clothing to label.

    python -m benchmarks.papers.active_learning.images --root DATA [--methods random bald] [--seeds 3] [--rounds 12]
        [--json FILE] [--figure FILE]

The pool has 2000 FashionMNIST images. Training starts with 20 random labels; 20 more are added after each fit from scratch.
Test accuracy and NLL are those of the predictive on 2000 test images. The controls are random selection, and the entropy of
the posterior mean as a single network, which needs no posterior. Initial labels and weights are the same for all methods of
a seed. No setting was chosen with these runs. JSON is written after each run; finished runs are skipped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from lightning.pytorch import LightningDataModule, seed_everything
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.line_figure import line_figure
from benchmarks.over_seeds import mean_and_error
from benchmarks.provenance import save_json
from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes import VOGNCallback, mc_predict
from lightning_bayes.metrics.figure_style import BLUE, GREY, VERMILLION
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive import bald, batch_bald, power_bald, predictive_entropy, top_rows
from lightning_bayes.zoo import BayesClassifier, FashionMNISTDataModule, LeNet5
from lightning_bayes.zoo.data import PoolDataModule

Choose = Callable[[PoolDataModule, Callable[[int], Tensor], int], Any]
SAMPLES: Final = 20
METHODS: Final[dict[str, tuple[str, str, Choose]]] = {  # title, colour, selection from probabilities [S, B, C]
    "random": ("random", GREY, lambda pool, probs, size: pool.draw(size)),
    "mean_entropy": (
        "entropy of the mean",
        "#000000",
        lambda pool, probs, size: top_rows(predictive_entropy(probs(0)), size),
    ),
    "entropy": ("entropy", "#56b4e9", lambda pool, probs, size: top_rows(predictive_entropy(probs(SAMPLES)), size)),
    "bald": ("BALD", BLUE, lambda pool, probs, size: top_rows(bald(probs(SAMPLES)), size)),
    "power_bald": (
        "power-BALD",
        "#009e73",
        lambda pool, probs, size: power_bald(probs(SAMPLES), size, generator=pool.generator),
    ),
    "batch_bald": ("BatchBALD", VERMILLION, lambda pool, probs, size: batch_bald(probs(SAMPLES), size)),
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Settings shared by all runs."""

    pool: int = 2000
    tested: int = 2000
    size: int = 20
    rounds: int = 12
    epochs: int = 60


def read(root: str, setting: Setting) -> tuple[TensorDataset, TensorDataset]:
    """Read the pool and the test set, from a folder with ``FashionMNIST``."""
    module = FashionMNISTDataModule(root, val_size=0, train_size=setting.pool)
    module.setup("fit")
    module.setup("test")
    return _tensors(module.train_set, setting.pool), _tensors(module.test_set, setting.tested)


def _tensors(rows: Any, count: int) -> TensorDataset:
    pairs = [rows[number] for number in range(min(count, len(rows)))]
    return TensorDataset(torch.stack([x for x, _ in pairs]), torch.tensor([int(y) for _, y in pairs]))


def fit(pool: PoolDataModule, seed: int, epochs: int) -> tuple[BayesClassifier, AbstractPosterior]:
    """Train from scratch on the labelled images."""
    seed_everything(seed, verbose=False)
    task = BayesClassifier(LeNet5(), 10, optimizer=lambda params: torch.optim.Adam(params, lr=1e-3))
    callback = VOGNCallback(seed=seed)
    with quiet():
        quiet_trainer([callback], epochs, limit_val_batches=0).fit(task, pool)
    assert callback.optimizer is not None
    return task.eval(), callback.optimizer.posterior()


@torch.no_grad()
def run(method: str, seed: int, data: tuple[TensorDataset, TensorDataset], setting: Setting) -> Row:
    """Run all rounds of one method."""
    source = LightningDataModule.from_datasets(data[0])
    pool = PoolDataModule(source, setting.size, batch_size=setting.size, seed=seed)
    pool.setup("fit")
    row: Row = {"method": method, "seed": seed, "accuracy": [], "nll": []}
    start = time.perf_counter()
    for number in range(setting.rounds):
        with torch.enable_grad():
            task, posterior = fit(pool, seed, setting.epochs)
        probs = mc_predict(task, posterior, data[1].tensors[0], SAMPLES).probs
        row["accuracy"].append(float((probs.argmax(1) == data[1].tensors[1]).float().mean()))
        row["nll"].append(float(-probs.gather(1, data[1].tensors[1][:, None]).log().mean()))
        if number + 1 < setting.rounds:
            candidates = data[0].tensors[0][pool.unlabelled]
            pool.label(METHODS[method][2](pool, lambda s: _sample_probs(task, posterior, candidates, s), setting.size))  # noqa: B023
    return {**row, "seconds": round(time.perf_counter() - start, 1)}


def _sample_probs(task: BayesClassifier, posterior: AbstractPosterior, inputs: Tensor, samples: int) -> Tensor:
    """Probabilities ``[S, B, C]``; with 0 samples, those of the posterior mean, which are the task's weights after a fit."""
    if samples == 0:
        return task(inputs).softmax(1)[None]
    probs: Tensor = mc_predict(task, posterior, inputs, samples).sample_probs
    return probs


def table(rows: list[Row], size: int) -> str:
    """Format a Markdown table of accuracy and NLL averaged over the rounds, and final accuracy.

    Differences to random selection are paired by seed.
    """
    lines = [
        "| method | accuracy, all rounds | minus random | NLL, all rounds | accuracy at the end | minus random | seeds |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    random_rows = {row["seed"]: row for row in rows if row["method"] == "random"}
    for method, (title, *_) in METHODS.items():
        by_seed = {row["seed"]: row for row in rows if row["method"] == method}
        if not by_seed:
            continue
        scores = {seed: _scores(by_seed[seed]) for seed in sorted(by_seed)}
        mean, nll, at_end = (mean_and_error([score[i] for score in scores.values()]) for i in range(3))
        paired = [(scores[seed], _scores(row)) for seed, row in random_rows.items() if seed in scores]
        against = ["–", "–"]
        if method != "random" and paired:
            against = [mean_and_error([score[i] - base[i] for score, base in paired], "+") for i in (0, 2)]
        cells = [title, mean, against[0], nll, at_end, against[1], str(len(by_seed))]
        lines.append(f"| {' | '.join(cells)} |")
    count = max((len(row["accuracy"]) for row in rows), default=0) * size
    return "\n".join([*lines, "", f"The end is at {count} labels."])


def _scores(row: Row) -> tuple[float, float, float]:
    return fmean(row["accuracy"]), fmean(row["nll"]), row["accuracy"][-1]


def draw(rows: list[Row], path: Path, size: int) -> None:
    """Plot the accuracy over the number of labels: thin lines for runs, thick lines for their means."""
    with line_figure(path, (7, 4), loc="lower right") as axes:
        for method, (title, colour, _) in METHODS.items():
            curves = [row["accuracy"] for row in rows if row["method"] == method]
            if not curves:
                continue
            labels = [size * (number + 1) for number in range(len(curves[0]))]
            for curve in curves:
                axes.plot(labels, curve, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(labels, torch.tensor(curves).mean(0), color=colour, linewidth=2, label=title)
        axes.set(xlabel="labels", ylabel="test accuracy")


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder with FashionMNIST")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="written after each run; finished runs are skipped")
    parser.add_argument("--figure", type=Path)
    for name, default in asdict(Setting()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    setting = Setting(**{name: getattr(options, name) for name in asdict(Setting())})
    results: Row = {"setting": asdict(setting), "runs": []}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text("utf-8"))
        if results["setting"] != asdict(setting):
            parser.error(f"{options.json} has runs with {results['setting']}. Use the same settings or another file.")
    rows, data = results["runs"], read(options.root, setting)
    for seed in range(options.seeds):
        for method in options.methods:
            if any((row["method"], row["seed"]) == (method, seed) for row in rows):
                continue
            rows.append(run(method, seed, data, setting))
            print(f"{method}, seed {seed}: {rows[-1]['accuracy'][-1]:.3f}, {rows[-1]['seconds']} s", flush=True)
            save_json(options.json, results)
    if options.figure:
        draw(rows, options.figure, setting.size)
    print(table(rows, setting.size))


if __name__ == "__main__":
    main()
