"""Active learning on images: a LeNet-5 that chooses which pictures of clothes get a label.

    python -m benchmarks.papers.active_learning.images --root DATA [--methods random bald] [--seeds 3] [--rounds 12]
        [--json FILE] [--figure FILE]

A pool of 2000 FashionMNIST images, 20 labels drawn at random to start with, and 20 more after each fit from scratch. Test
accuracy and NLL are those of the predictive on 2000 test images. The controls are a random choice, and the entropy of the
posterior mean as one network, which needs no posterior. First labels and weights are the same for all methods of a seed.
Nothing was chosen by these runs. JSON is written after each run; what it holds is not run again.
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
from benchmarks.provenance import provenance
from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes import VOGNCallback, mc_predict
from lightning_bayes.metrics.figure_style import BLUE, GREY, VERMILLION
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive import bald, batch_bald, power_bald, predictive_entropy, top_rows
from lightning_bayes.zoo import BayesClassifier, FashionMNISTDataModule, LeNet5
from lightning_bayes.zoo.data import PoolDataModule

Choose = Callable[[PoolDataModule, Callable[[int], Tensor], int], Any]
SAMPLES: Final = 20
METHODS: Final[dict[str, tuple[str, str, Choose]]] = {  # title, colour, choice from probabilities [S, B, C]
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
    """What all runs share.

    Attributes:
        pool: Images that may be labelled.
        tested: Test images.
        size: Labels at the start, and of each round.
        rounds: Fits.
        epochs: Of each fit.
    """

    pool: int = 2000
    tested: int = 2000
    size: int = 20
    rounds: int = 12
    epochs: int = 60


def read(root: str, setting: Setting) -> tuple[TensorDataset, TensorDataset]:
    """The pool and the test images.

    Args:
        root: Folder with ``FashionMNIST``.
        setting: How many.

    Returns:
        Images and classes of both.
    """
    module = FashionMNISTDataModule(root, val_size=0, train_size=setting.pool)
    module.setup("fit")
    module.setup("test")
    return _tensors(module.train_set, setting.pool), _tensors(module.test_set, setting.tested)


def _tensors(rows: Any, count: int) -> TensorDataset:
    pairs = [rows[number] for number in range(min(count, len(rows)))]
    return TensorDataset(torch.stack([x for x, _ in pairs]), torch.tensor([int(y) for _, y in pairs]))


def fit(pool: PoolDataModule, seed: int, epochs: int) -> tuple[BayesClassifier, AbstractPosterior]:
    """Train from scratch on what is labelled."""
    seed_everything(seed, verbose=False)
    task = BayesClassifier(LeNet5(), 10, optimizer=lambda params: torch.optim.Adam(params, lr=1e-3))
    callback = VOGNCallback(seed=seed)
    with quiet():
        quiet_trainer([callback], epochs, limit_val_batches=0).fit(task, pool)
    assert callback.optimizer is not None
    return task.eval(), callback.optimizer.posterior()


@torch.no_grad()
def run(method: str, seed: int, data: tuple[TensorDataset, TensorDataset], setting: Setting) -> Row:
    """All rounds of one method.

    Args:
        method: Key of `METHODS`.
        seed: Of first labels, weights, order and noise.
        data: Pool and test images.
        setting: The rest.

    Returns:
        Accuracy and NLL [nats] after each fit.
    """
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
    """Probabilities ``[S, B, C]``; of the posterior mean for no samples, which the task has after a fit."""
    if samples == 0:
        return task(inputs).softmax(1)[None]
    found: Tensor = mc_predict(task, posterior, inputs, samples).sample_probs
    return found


def table(rows: list[Row], size: int) -> str:
    """Markdown: accuracy and NLL averaged over the rounds, and the accuracy at the end, with paired differences to random.

    Args:
        rows: From `run`.
        size: Labels of a round.

    Returns:
        A line per method, ± standard errors over seeds.
    """
    lines = [
        "| method | accuracy, all rounds | minus random | NLL, all rounds | accuracy at the end | minus random | seeds |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for method, (title, *_) in METHODS.items():
        found = {row["seed"]: row for row in rows if row["method"] == method}
        if not found:
            continue
        scores = [_scores(found[seed]) for seed in sorted(found)]
        pairs = [
            [a - b for a, b in zip(_scores(found[r["seed"]]), _scores(r), strict=True)] for r in _shared(rows, found)
        ]
        mean, nll, at_end = (mean_and_error([each[i] for each in scores]) for i in range(3))
        is_control = method == "random" or not pairs
        against = ["–", "–"] if is_control else [mean_and_error([pair[i] for pair in pairs], "+") for i in (0, 2)]
        cells = [title, mean, against[0], nll, at_end, against[1], str(len(found))]
        lines.append(f"| {' | '.join(cells)} |")
    count = max((len(row["accuracy"]) for row in rows), default=0) * size
    return "\n".join([*lines, "", f"The end is at {count} labels."])


def _scores(row: Row) -> tuple[float, float, float]:
    return fmean(row["accuracy"]), fmean(row["nll"]), row["accuracy"][-1]


def _shared(rows: list[Row], found: dict[int, Row]) -> list[Row]:
    return [row for row in rows if row["method"] == "random" and row["seed"] in found]


def draw(rows: list[Row], path: Path, size: int) -> None:
    """Accuracy over the number of labels: single runs thin, means thick.

    Args:
        rows: From `run`.
        path: Of the picture.
        size: Labels of a round.
    """
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
    parser.add_argument("--json", type=Path, help="written after each run, and resumed from")
    parser.add_argument("--figure", type=Path)
    for name, default in asdict(Setting()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    setting = Setting(**{name: getattr(options, name) for name in asdict(Setting())})
    kept: Row = {"setting": asdict(setting), "runs": []}
    if options.json and options.json.exists():
        kept = json.loads(options.json.read_text("utf-8"))
        if kept["setting"] != asdict(setting):
            parser.error(f"{options.json} has runs of {kept['setting']}. Take the same setting, or another file.")
    rows, data = kept["runs"], read(options.root, setting)
    for seed in range(options.seeds):
        for method in options.methods:
            if any((row["method"], row["seed"]) == (method, seed) for row in rows):
                continue
            rows.append(run(method, seed, data, setting))
            print(f"{method}, seed {seed}: {rows[-1]['accuracy'][-1]:.3f}, {rows[-1]['seconds']} s", flush=True)
            if options.json:
                options.json.write_text(json.dumps({**provenance(), **kept}, indent=1) + "\n", "utf-8")
    if options.figure:
        draw(rows, options.figure, setting.size)
    print(table(rows, setting.size))


if __name__ == "__main__":
    main()
