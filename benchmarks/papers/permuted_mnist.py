"""Permuted MNIST: one network learns ten tasks in sequence, each with its own order of the pixels.

    python -m benchmarks.papers.permuted_mnist --root DATA --json FILE --work FOLDER [--tasks 10] [--epochs 100]
        [--seeds 0 1 2] [--methods posterior adam permuted scalar] [--figure FILE]
    python -m benchmarks.papers.permuted_mnist --root DATA --json FILE --work DIR --samples 10 --methods posterior --seeds 0

The network has two hidden layers of 100 units and one head, as in Nguyen et al. 2018 (variational continual learning, VCL).
Settings are those of Osawa et al. 2019 and Eschenhagen's thesis: α = 1e-3, β₂ = .999, prior N(0, 1) for the first task, an
initial precision of 1e6, and PyTorch's initial means drawn anew for each task. Methods:

    posterior    VOGN whose prior is the posterior after the previous task: a mean and a precision per weight
    permuted     the same with the precisions of each tensor in a random order: the control of the curvature
    scalar       the same with one precision per tensor, its mean
    adam         Adam from the last weights, without a prior

After each task, the test accuracy on all tasks so far is measured at the posterior mean; after the last task also under 10
posterior samples. JSON is written after each task. A run goes on from the last task whose state is in the work folder, and
starts again if it is not there. With one sample, a run of ten tasks takes 15 minutes of a core.
"""

from __future__ import annotations

import argparse
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
from benchmarks.provenance import save_json, saved_rows
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
    epochs: int = 100
    batch: int = 256
    hidden: int = 100
    lr: float = 1e-3  # α of VOGN
    adam_lr: float = 1e-3
    prior_precision: float = 1.0  # δ of the first task
    init_precision: float = 1e6  # of the posterior before the first update of each task
    beta: float = 0.999  # β₂
    samples: int = 1  # weight samples per update


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


def shuffled(precision: Tensor, generator: torch.Generator) -> Tensor:
    """The same precisions in a random order."""
    return precision.flatten()[torch.randperm(precision.numel(), generator=generator)].view_as(precision)


def prior_after(method: str, posterior: MeanField | None, seed: int) -> MeanField | None:
    """The prior of the next task: the posterior, or a control with its means and other precisions."""
    if posterior is None or method == "posterior":
        return posterior
    generator = torch.Generator().manual_seed(seed)
    precision = {
        name: shuffled(value, generator) if method == "permuted" else value.mean().expand_as(value).clone()
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
        init_precision=settings.init_precision,
        mc_samples=settings.samples,
        seed=seed,
    )
    for inputs, labels in batches(train, settings, seed):
        for _ in range(settings.samples):
            with optimizer.sampled_params():
                F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    posterior = optimizer.posterior()
    assert isinstance(posterior, MeanField)
    return posterior


@dataclass
class Learner:
    """A run so far: its row, the network, and the posterior if the method has one."""

    row: Row
    model: nn.Module
    posterior: MeanField | None = None

    def learn(self, train: Pair, settings: Settings, seed: int) -> None:
        """Learn one more task, from new means unless the method is Adam."""
        torch.manual_seed(seed)
        if self.row["method"] == "adam":
            fit_adam(self.model, train, settings, seed)
        else:
            self.model = network(settings.hidden)
            prior = prior_after(self.row["method"], self.posterior, seed)
            self.posterior = fit_vogn(self.model, train, settings, seed, prior)

    def accuracies(self, test: Pair, orders: list[Tensor]) -> list[float]:
        """Test accuracy at the mean, one per task."""
        with torch.no_grad():
            return [accuracy_of(self.model(test[0][:, order]), test[1]) for order in orders]

    def sampled(self, test: Pair, orders: list[Tensor]) -> list[float]:
        """Test accuracy under posterior samples, one per task; none without a posterior."""
        if self.posterior is None:
            return []
        probs = (mc_predict(self.model, self.posterior, test[0][:, order], SAMPLES).probs for order in orders)
        return [accuracy_of(prob, test[1]) for prob in probs]


def started(method: str, seed: int, settings: Settings, state: Path | None) -> Learner:
    """The run as its state file has it, or a new one."""
    if state is not None and state.exists():
        learner: Learner = torch.load(state, weights_only=False)
        return learner
    torch.manual_seed(seed)
    row = {"method": method, "seed": seed, "accuracy": [], "sampled": [], "seconds": 0.0}
    return Learner(row, network(settings.hidden))


def run(learner: Learner, train: Pair, test: Pair, settings: Settings, state: Path | None = None) -> Iterator[Row]:
    """Learn the remaining tasks in sequence; yields the row after each one, whose learner is then in the state file."""
    row, seed = learner.row, learner.row["seed"]
    orders = [permutation(seed, task) for task in range(settings.tasks)]
    for task in range(len(row["accuracy"]), settings.tasks):
        start = time.process_time()
        learner.learn((train[0][:, orders[task]], train[1]), settings, 100 * seed + task)
        row["accuracy"].append(learner.accuracies(test, orders[: task + 1]))
        if task + 1 == settings.tasks:
            row["sampled"] = learner.sampled(test, orders)
        row["seconds"] += time.process_time() - start
        if state is not None:
            torch.save(learner, state)
        yield row


def accuracy_of(scores: Tensor, labels: Tensor) -> float:
    """Fraction of correct predictions."""
    return float((scores.argmax(1) == labels).float().mean())


def table(rows: list[Row], tasks: int) -> str:
    """A Markdown table of the average accuracy after the last task, with standard errors over finished seeds."""
    lines = [
        f"| method | seeds | accuracy, average of {tasks} tasks, at the mean | {SAMPLES} samples | first task | last task |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method in METHODS:
        finished = [row for row in rows if row["method"] == method and len(row["accuracy"]) == tasks]
        final = [row["accuracy"][-1] for row in finished]
        sampled = [fmean(row["sampled"]) for row in finished if row["sampled"]]
        columns = ([fmean(each) for each in final], sampled, [each[0] for each in final], [each[-1] for each in final])
        if finished:
            lines.append(f"| {method} | {len(final)} | {' | '.join(mean_and_error(c) if c else '' for c in columns)} |")
    return "\n".join(
        [*lines, *(f"| {name} | | {value} | | | |" for name, value in PUBLISHED.items()), *progress(rows, tasks)]
    )


def progress(rows: list[Row], tasks: int) -> Iterator[str]:
    """The average accuracy after each task of the runs that go on."""
    for row in rows:
        if len(row["accuracy"]) < tasks:
            averages = " ".join(f"{fmean(each):.4f}" for each in row["accuracy"])
            yield f"\n{row['method']}, seed {row['seed']}, not finished; average after each task: {averages}"


def draw(rows: list[Row], path: Path, tasks: int) -> None:
    """Plot the average accuracy over the tasks so far, one line per method with bars of one standard error."""
    finished = [row for row in rows if len(row["accuracy"]) == tasks]
    with line_figure(path, (4.8, 3.4)) as axes:
        for method, colour in METHODS.items():
            averages = [[fmean(each) for each in row["accuracy"]] for row in finished if row["method"] == method]
            if not averages:
                continue
            values = torch.tensor(averages)
            error = values.std(0) / len(averages) ** 0.5 if len(averages) > 1 else None
            axes.errorbar(range(1, tasks + 1), values.mean(0), error, color=colour, marker="o", ms=3, label=method)
        axes.set(xlabel="tasks learned", ylabel="average test accuracy of tasks so far")


def main(arguments: list[str] | None = None) -> None:
    """Run the missing methods and seeds, save them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder with MNIST")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="written after each task; finished runs are skipped")
    parser.add_argument("--work", type=Path, help="folder of the states from which unfinished runs go on")
    parser.add_argument("--figure", type=Path)
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args(arguments)
    settings = Settings(**{name: getattr(options, name) for name in asdict(Settings())})
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
    train, test = load(options.root, train=True), load(options.root, train=False)
    saved = saved_rows(options.json, "rows", settings=asdict(settings))
    rows = {(row["method"], row["seed"]): row for row in saved}
    for seed, method in product(options.seeds, options.methods):
        if len(rows.get((method, seed), {"accuracy": []})["accuracy"]) == settings.tasks:
            continue
        state = options.work / f"{method}-{seed}-{settings.samples}.pt" if options.work else None
        for row in run(started(method, seed, settings, state), train, test, settings, state):
            rows[method, seed] = row
            save_json(options.json, {"settings": asdict(settings), "rows": list(rows.values())})
    finished = list(rows.values())
    if options.figure:
        draw(finished, options.figure, settings.tasks)
    print(table(finished, settings.tasks))


if __name__ == "__main__":
    main()
