"""Permuted MNIST: one network learns ten tasks in sequence, each with its own order of the pixels.

    python -m benchmarks.papers.permuted_mnist --root DATA [--tasks 10] [--epochs 3] [--seeds 0 1 2]
        [--json FILE] [--figure FILE]

The network has two hidden layers of 100 units and one head, as in Nguyen et al. 2018 (variational continual learning, VCL)
and Osawa et al. 2019 (VOGN). Methods:

    posterior    VOGN whose prior is the posterior after the previous task: a mean and a precision per weight
    permuted     the same with the precisions of each tensor in a random order: the control of the curvature
    scalar       VOGN from the last weights, with the prior of the first task for every task
    adam         Adam from the last weights, without a prior

After each task, the test accuracy on all tasks so far is measured at the posterior mean; after the last task also under 10
posterior samples. JSON is written after each run; finished runs are skipped. Settings were chosen on seed 100.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.datasets import MNIST

from benchmarks.line_figure import line_figure
from benchmarks.over_seeds import mean_and_error
from benchmarks.provenance import save_json
from lightning_bayes import VOGN, MeanField, mc_predict
from lightning_bayes.metrics.figure_style import BLUE, GREY, VERMILLION

Pair = tuple[Tensor, Tensor]
Row = dict[str, Any]
METHODS: Final = {"posterior": BLUE, "permuted": VERMILLION, "scalar": "#009e73", "adam": GREY}
PUBLISHED: Final = {"VOGN, Osawa et al. 2019": "0.940 ± 0.008", "VCL without coresets, Nguyen et al. 2018": "0.90"}
SAMPLES: Final = 10


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of a task."""

    tasks: int = 10
    epochs: int = 3
    batch: int = 256
    hidden: int = 100
    lr: float = 1e-2  # α of VOGN
    adam_lr: float = 1e-3
    damping: float = 1e-2  # γ
    prior_precision: float = 100.0  # δ of the first task
    beta: float = 0.999  # β₂


def load(root: Path, train: bool) -> Pair:
    """Images as vectors between 0 and 1, and labels."""
    stored = MNIST(root, train=train)
    return stored.data.flatten(1) / 255, stored.targets


def permutation(seed: int, task: int) -> Tensor:
    """The order of the pixels of a task; the first task is permuted too."""
    return torch.randperm(784, generator=torch.Generator().manual_seed(1000 * seed + task))


def network(hidden: int) -> nn.Sequential:
    """A network with two hidden layers."""
    return nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def shuffled(posterior: MeanField, seed: int) -> MeanField:
    """The posterior with the precisions of each tensor in a random order."""
    generator = torch.Generator().manual_seed(seed)
    precision = {
        name: value.flatten()[torch.randperm(value.numel(), generator=generator)].view_as(value)
        for name, value in posterior.precision.items()
    }
    return replace(posterior, precision=precision)


def batches(train: Pair, settings: Settings, seed: int) -> Iterator[Pair]:
    """All rows in a random order, once per epoch."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.epochs):
        order = torch.randperm(len(train[0]), generator=generator)
        for rows in order.split(settings.batch):  # type: ignore[no-untyped-call]
            yield train[0][rows], train[1][rows]


def fit_adam(model: nn.Module, train: Pair, settings: Settings, seed: int) -> None:
    """Train on one task with Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.adam_lr)
    for inputs, labels in batches(train, settings, seed):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def fit_vogn(model: nn.Module, train: Pair, settings: Settings, seed: int, prior: MeanField | None) -> MeanField:
    """Train on one task with VOGN and return the posterior."""
    optimizer = VOGN(
        model,
        lr=settings.lr,
        betas=(0.9, settings.beta),
        num_data=len(train[0]),
        prior_precision=settings.prior_precision,
        prior=prior,
        damping=settings.damping,
        seed=seed,
    )
    for inputs, labels in batches(train, settings, seed):
        with optimizer.sampled_params():
            F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    posterior = optimizer.posterior()
    assert isinstance(posterior, MeanField)
    return posterior


def run(method: str, train: Pair, test: Pair, settings: Settings, seed: int) -> Row:
    """Learn all tasks in sequence."""
    torch.manual_seed(seed)
    model, posterior, started = network(settings.hidden), None, time.process_time()
    orders, accuracy = [permutation(seed, task) for task in range(settings.tasks)], []
    for task, order in enumerate(orders):
        data = (train[0][:, order], train[1])
        if method == "adam":
            fit_adam(model, data, settings, 100 * seed + task)
        else:
            prior = None if method == "scalar" else posterior
            if prior is not None and method == "permuted":
                prior = shuffled(prior, 100 * seed + task)
            posterior = fit_vogn(model, data, settings, 100 * seed + task, prior)
        with torch.no_grad():
            accuracy.append([accuracy_of(model(test[0][:, order]), test[1]) for order in orders[: task + 1]])
    sampled = [
        accuracy_of(mc_predict(model, posterior, test[0][:, o], SAMPLES).probs, test[1]) for o in orders if posterior
    ]
    return {"accuracy": accuracy, "sampled": sampled, "seconds": time.process_time() - started}


def accuracy_of(scores: Tensor, labels: Tensor) -> float:
    """Fraction of correct predictions."""
    return float((scores.argmax(1) == labels).float().mean())


def table(rows: list[Row]) -> str:
    """A Markdown table of the average accuracy after the last task, with standard errors over seeds."""
    lines = [
        f"| method | accuracy, average of all tasks, at the mean | under {SAMPLES} samples | first task | last task |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for method in METHODS:
        method_rows = [row for row in rows if row["method"] == method]
        final = [row["accuracy"][-1] for row in method_rows]
        sampled = [fmean(row["sampled"]) for row in method_rows if row["sampled"]]
        columns = ([fmean(tasks) for tasks in final], sampled, [tasks[0] for tasks in final], [t[-1] for t in final])
        if method_rows:
            lines.append(f"| {method} | {' | '.join(mean_and_error(c) if c else '' for c in columns)} |")
    return "\n".join([*lines, *(f"| {name} | {value} | | | |" for name, value in PUBLISHED.items())])


def draw(rows: list[Row], path: Path) -> None:
    """Plot the average accuracy over the tasks so far, one line per method with bars of one standard error."""
    with line_figure(path, (4.8, 3.4)) as axes:
        for method, colour in METHODS.items():
            averages = [[fmean(tasks) for tasks in row["accuracy"]] for row in rows if row["method"] == method]
            if not averages:
                continue
            values = torch.tensor(averages)
            error = values.std(0) / len(averages) ** 0.5 if len(averages) > 1 else None
            axes.errorbar(
                range(1, values.shape[1] + 1), values.mean(0), error, color=colour, marker="o", ms=3, label=method
            )
        axes.set(xlabel="tasks learned", ylabel="average test accuracy of tasks so far")


def main(arguments: list[str] | None = None) -> None:
    """Run the missing methods and seeds, save them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder with MNIST")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="written after each run; finished runs are skipped")
    parser.add_argument("--figure", type=Path)
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = parser.parse_args(arguments)
    settings = Settings(**{name: getattr(options, name) for name in asdict(Settings())})
    results: dict[str, Any] = {"settings": asdict(settings), "rows": []}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text("utf-8"))
        if results["settings"] != asdict(settings):
            parser.error(f"{options.json} has runs with {results['settings']}. Use the same settings or another file.")
    train, test = load(options.root, train=True), load(options.root, train=False)
    done = {(row["method"], row["seed"]) for row in results["rows"]}
    for seed, method in product(options.seeds, options.methods):
        if (method, seed) in done:
            continue
        results["rows"].append({"method": method, "seed": seed, **run(method, train, test, settings, seed)})
        save_json(options.json, results)
    if options.figure:
        draw(results["rows"], options.figure)
    print(table(results["rows"]))


if __name__ == "__main__":
    main()
