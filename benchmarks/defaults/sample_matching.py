"""Monte-Carlo error of a prediction: samples matched to the posterior mean, compared with independent ones.

    python -m benchmarks.defaults.sample_matching --root DATA [--problems digits-mlp digits] [--samples 10] [--seeds 3]
        [--json benchmarks/results/sample_matching.json]

Each seed trains once with Adam and `VOGNCallback()`. Several sets of S samples of both kinds then predict the test set. The
error of a set is its test NLL minus that of 500 independent samples; the table shows the root mean square of these errors.
MI is the AUROC of out-of-distribution images by mutual information, of the 500 samples and averaged over the sets.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.defaults.problems import PROBLEMS, Data, Problem
from benchmarks.defaults.scores import classification_scores, ood_scores
from benchmarks.defaults.training import UserModule, fit
from benchmarks.provenance import save_json
from lightning_bayes import VOGNCallback
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive import NetworkSamples, PosteriorSamples, Samples, temporary_weights
from lightning_bayes.predictive.samples import sample_seed

REFERENCE = 500  # independent samples
SETS = 5  # sets of S samples of each kind
Row: TypeAlias = dict[str, str | int | float]


class IndependentSamples(NetworkSamples):
    """S independent samples of a posterior: the draws of `PosteriorSamples` before they are matched."""

    def __init__(self, posterior: AbstractPosterior, count: int, seed: int) -> None:
        self.posterior, self.count, self.seed = posterior, count, seed

    def sampled(self, model: nn.Module, index: int) -> AbstractContextManager[None]:
        """Context in which `model` has the weights of sample `index`."""
        generator = torch.Generator().manual_seed(sample_seed(self.seed, index))
        return temporary_weights(model, self.posterior.sample(generator))


KINDS: dict[str, Callable[[AbstractPosterior, int, int], Samples]] = {
    "matched": PosteriorSamples,
    "independent": IndependentSamples,
}


def trained(problem: Problem, data: Data, seed: int) -> tuple[UserModule, AbstractPosterior]:
    """Train once, and return the module and its posterior."""
    seed_everything(seed, verbose=False)
    module, callback = UserModule(problem, data, "adam"), VOGNCallback(seed=seed)
    fit(module, TensorDataset(data.train_x, data.train_y), [callback])
    assert callback.optimizer is not None
    return module, callback.optimizer.posterior()


@torch.no_grad()
def scores(module: UserModule, data: Data, samples: Samples) -> dict[str, float]:
    """NLL on the test set and, if there are out-of-distribution images, the AUROC by mutual information."""
    outputs = samples.outputs(module, lambda: module(data.test_x))
    result = {"nll": classification_scores(outputs, data.test_y)["nll"]}
    if data.ood_x is not None:
        outside = data.ood_x
        result["mi_auroc"] = ood_scores(outputs, samples.outputs(module, lambda: module(outside)))["mi_auroc"]
    return result


def measure(name: str, root: Path, count: int, seed: int) -> Row:
    """Compare both kinds of samples on one trained network."""
    problem = PROBLEMS[name]
    data = problem.load(root, seed)
    module, posterior = trained(problem, data, seed)
    reference = scores(module, data, IndependentSamples(posterior, REFERENCE, seed=0))
    row: Row = {"problem": name, "samples": count, "seed": seed, **reference}
    for kind, make in KINDS.items():
        runs = [scores(module, data, make(posterior, count, 1 + index)) for index in range(SETS)]
        row[f"{kind} error"] = math.sqrt(fmean((run["nll"] - reference["nll"]) ** 2 for run in runs))
        if "mi_auroc" in reference:
            row[f"{kind} mi_auroc"] = fmean(run["mi_auroc"] for run in runs)
    return row


def table(rows: list[Row]) -> str:
    """The rows in Markdown, averaged over seeds."""
    lines = [
        "| problem | S | NLL | error, matched | error, independent | MI | MI, matched | MI, independent |",
        "|---|---|---|---|---|---|---|---|",
    ]
    columns = ["nll", "matched error", "independent error", "mi_auroc", "matched mi_auroc", "independent mi_auroc"]
    for name, count in dict.fromkeys((str(row["problem"]), int(row["samples"])) for row in rows):
        runs = [row for row in rows if (row["problem"], row["samples"]) == (name, count)]
        digits = {key: 5 if key.endswith("error") else 4 for key in columns}
        cells = [
            f"{fmean(float(row[key]) for row in runs):.{digits[key]}f}" if key in runs[0] else "–" for key in columns
        ]
        lines.append(f"| {name} | {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Train, compare and print the table."""
    classifications = [name for name, problem in PROBLEMS.items() if not problem.is_regression]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--problems", nargs="+", choices=classifications, default=["digits-mlp", "digits"])
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for name in options.problems:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            rows.append(measure(name, options.root, options.samples, seed))
            print(rows[-1], flush=True)
            save_json(options.json, {"rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
