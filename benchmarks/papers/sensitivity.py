"""Label errors found by sensitivity, and the test NLL estimated without test data (Nickl et al. 2023), on MNIST.

    python -m benchmarks.papers.sensitivity --root DATA [--rows 3000] [--share 0.1] [--epochs 40] [--seeds 3]
        [--structure kronecker] [--json FILE] [--figure FILE]

A fraction of the labels is replaced by other classes. Adam trains a network with one hidden layer to the MAP, and the
Laplace approximation gives its posterior. Examples are ranked by sensitivity, leave-one-out NLL, loss and margin. If n
labels are wrong, the n highest-ranked examples should be those. A second run with clean labels compares, after each epoch,
the leave-one-out NLL of the training set with its NLL and with the test NLL.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.datasets import MNIST

from benchmarks.line_figure import line_figure
from benchmarks.provenance import save_json
from lightning_bayes.metrics.figure_style import BLUE, GREY, VERMILLION
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.posthoc import StructureName, laplace
from lightning_bayes.predictive import leave_one_out

Pair = tuple[Tensor, Tensor]
PRIOR_PRECISION = 10.0  # δ, for every weight
SCORES = ("sensitivity", "leave-one-out NLL", "loss", "margin")


def load(root: Path, rows: int, seed: int) -> tuple[Pair, Pair]:
    """Random training rows and all test rows, as vectors with mean 0 and variance 1."""
    parts = []
    for train in (True, False):
        stored = MNIST(root, train=train)
        count = rows if train else len(stored)
        chosen = torch.randperm(len(stored), generator=torch.Generator().manual_seed(seed))[:count]
        parts.append(((stored.data[chosen].flatten(1) / 255 - 0.1307) / 0.3081, stored.targets[chosen]))
    return parts[0], parts[1]


def relabelled(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Replace a fraction `share` of the labels by other classes; returns the labels and the mask of changes."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    changed = labels.clone()
    changed[wrong] = (labels[wrong] + torch.randint(1, 10, wrong.shape, generator=generator)) % 10
    return changed, changed != labels


class Run:
    """A network, its optimizer, and its Laplace posterior."""

    def __init__(self, train: Pair, seed: int, structure: StructureName, hidden: int = 50, batch: int = 100) -> None:
        torch.manual_seed(seed)
        self.train, self.batch, self.structure = train, batch, structure
        self.model = nn.Sequential(nn.Linear(784, hidden), nn.Tanh(), nn.Linear(hidden, 10))
        decay = PRIOR_PRECISION / len(train[0])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3, weight_decay=decay)

    def epoch(self) -> None:
        """Train on all rows once."""
        self.model.train()
        for rows in torch.randperm(len(self.train[0])).split(self.batch):  # type: ignore[no-untyped-call]
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(self.train[0][rows]), self.train[1][rows]).backward()
            self.optimizer.step()
        self.model.eval()

    def posterior(self) -> AbstractPosterior:
        """The Laplace posterior of the current weights."""
        approximation = laplace(
            self.model,
            self.batches(),
            structure=self.structure,
            subset="all",
            prior_precision=PRIOR_PRECISION,
            require_trained=False,
        )
        return approximation.posterior

    def batches(self) -> list[Pair]:
        """The training rows in order."""
        return list(zip(self.train[0].split(500), self.train[1].split(500), strict=True))

    @torch.no_grad()
    def losses(self, rows: Pair) -> Tensor:
        """NLL at the posterior mean, ``[N]``."""
        return F.cross_entropy(self.model(rows[0]), rows[1], reduction="none")


@torch.no_grad()
def scores(run: Run) -> dict[str, Tensor]:
    """Scores of the training rows; a higher score is more suspicious."""
    probs = run.model(run.train[0]).softmax(1)
    label_probs = probs.gather(1, run.train[1][:, None])[:, 0]
    other_probs = probs.scatter(1, run.train[1][:, None], 0).max(1).values
    estimate = leave_one_out(run.model, run.posterior(), run.batches())
    values = (estimate.sensitivity, estimate.nll, run.losses(run.train), other_probs - label_probs)
    return dict(zip(SCORES, values, strict=True))


def found_share(score: Tensor, wrong: Tensor) -> float:
    """Fraction of wrong labels among the n rows with the highest score, where n labels are wrong."""
    return float(wrong[score.topk(int(wrong.sum())).indices].float().mean())


def wrong_labels(
    root: Path, rows: int, share: float, epochs: int, seed: int, structure: StructureName
) -> dict[str, float]:
    """Train with a fraction `share` of wrong labels, and return the fraction that each score finds."""
    train, _ = load(root, rows, seed)
    labels, wrong = relabelled(train[1], share, seed)
    run = Run((train[0], labels), seed, structure)
    for _ in range(epochs):
        run.epoch()
    return {name: found_share(score, wrong) for name, score in scores(run).items()}


def over_training(root: Path, rows: int, epochs: int, seed: int, structure: StructureName) -> list[dict[str, float]]:
    """NLL of training, leave-one-out and test after each epoch, on clean labels."""
    train, test = load(root, rows, seed)
    run, lines = Run(train, seed, structure), []
    for epoch in range(1, epochs + 1):
        run.epoch()
        left_out = leave_one_out(run.model, run.posterior(), run.batches()).nll
        lines.append(
            {
                "epoch": epoch,
                "train": float(run.losses(train).mean()),
                "leave-one-out": float(left_out.mean()),
                "error": float(left_out.std() / len(left_out) ** 0.5),
                "test": float(run.losses(test).mean()),
            }
        )
    return lines


def table(shares: list[dict[str, float]], lines: list[dict[str, float]]) -> str:
    """Format both results as Markdown."""
    rows = ["| score | share of wrong labels found, each seed | mean |", "| --- | --- | ---: |"]
    for name in SCORES:
        values = [share[name] for share in shares]
        rows.append(f"| {name} | {', '.join(f'{value:.3f}' for value in values)} | {sum(values) / len(values):.3f} |")
    rows += ["", "| epoch | train NLL | leave-one-out NLL | test NLL |", "| ---: | ---: | ---: | ---: |"]
    for line in lines:
        estimate = f"{line['leave-one-out']:.4f} ± {line['error']:.4f}"
        rows.append(f"| {line['epoch']:.0f} | {line['train']:.4f} | {estimate} | {line['test']:.4f} |")
    return "\n".join(rows)


def draw(lines: list[dict[str, float]], path: Path) -> None:
    """Plot the NLL over epochs."""
    with line_figure(path, (4.5, 3.2)) as axes:
        epochs = [line["epoch"] for line in lines]
        for name, colour in (("train", GREY), ("leave-one-out", VERMILLION), ("test", BLUE)):
            axes.plot(epochs, [line[name] for line in lines], color=colour, marker="o", markersize=3, label=name)
        axes.set(xlabel="epoch", ylabel="NLL [nats]", yscale="log")


def main(arguments: list[str] | None = None) -> None:
    """Run both experiments, save and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder with MNIST")
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--structure", default="kronecker", choices=["diagonal", "kronecker"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    shares = [
        wrong_labels(options.root, options.rows, options.share, options.epochs, seed, options.structure)
        for seed in range(options.seeds)
    ]
    lines = over_training(options.root, options.rows, options.epochs, 0, options.structure)
    save_json(options.json, {"wrong_labels": shares, "over_training": lines})
    if options.figure:
        draw(lines, options.figure)
    print(table(shares, lines))


if __name__ == "__main__":
    main()
