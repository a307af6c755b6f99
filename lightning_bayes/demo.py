"""The demo: LeNet-5 on scikit-learn's digits, trained with Adam and with VOGN, and compared.

``make demo`` runs it. It trains with the packaged configs ``digits+lenet5+adam`` and ``digits+lenet5+vogn``, and evaluates
the results with the public API.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_bayes.cli import instantiate
from lightning_bayes.metrics import (
    OODDetection,
    classification_metrics,
    reliability_diagram,
    score_histograms,
)
from lightning_bayes.optim.readout import load_posterior
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive import entropy, mc_predict

SAMPLES = 64  # S, number of posterior samples in the Monte-Carlo predictive

# Table column → metric key. The arrow points in the better direction.
COLUMNS = {
    "accuracy ↑": "cls/Acc",
    "NLL ↓": "cls/NLL",
    "Brier ↓": "cls/Brier",
    "ECE ↓": "cal/ECE",
    "OOD AUROC ↑": "ood/AUROC",
    "OOD FPR95 ↓": "ood/FPR95",
}


class Evaluation(NamedTuple):
    """Predictions of one method on the test set and on the out-of-distribution (OOD) sets."""

    probs: Tensor  # test set, [N, C]
    ood_probs: list[Tensor]  # one tensor per OOD set, [M, C]
    metrics: dict[str, float]


class Fitted(NamedTuple):
    """A finished run."""

    task: LightningModule
    data: Any
    checkpoint: Path
    seconds: float
    logged: dict[str, float]  # the last logged values


def fit(config: str, folder: Path, seed: int, progress: bool, overrides: Sequence[str] = ()) -> Fitted:
    """Train with a packaged config, and write the checkpoint and the config to `folder`."""
    run = instantiate(
        config,
        f"--seed_everything={seed}",
        f"--trainer.default_root_dir={folder}",
        f"--trainer.enable_progress_bar={str(progress).lower()}",
        "--trainer.enable_model_summary=false",
        "--trainer.logger=false",
        *overrides,
    )
    folder.mkdir(parents=True, exist_ok=True)
    run.parser.save(run.config, folder / "config.yaml", overwrite=True)
    start = time.perf_counter()
    run.trainer.fit(run.model, datamodule=run.datamodule)
    seconds = time.perf_counter() - start
    logged = {name: float(value) for name, value in run.trainer.callback_metrics.items()}
    return Fitted(run.model, run.datamodule, folder / "checkpoints" / "last.ckpt", seconds, logged)


@torch.no_grad()
def predict(task: LightningModule, posterior: AbstractPosterior | None, x: Tensor) -> Tensor:
    """Class probabilities of images."""
    if posterior is not None:
        probs: Tensor = mc_predict(task, posterior, x, samples=SAMPLES).probs
        return probs
    logits: Tensor = task.eval()(x)
    return logits.softmax(-1)


def evaluate(fitted: Fitted, posterior: AbstractPosterior | None = None) -> Evaluation:
    """Evaluate a run on the test digits, with the predictive entropy as the OOD score; `posterior` as in `predict`."""
    images, targets = fitted.data.test_set.tensors
    probs = predict(fitted.task, posterior, images)
    ood_probs = [predict(fitted.task, posterior, dataset.tensors[0]) for dataset in fitted.data.ood_sets]
    classes, ood = classification_metrics(10, prefix=""), OODDetection(sets=["ood"], scores=["entropy"])
    classes.update(probs, targets)
    ood.update({"entropy": entropy(probs)}, 0)
    for set_probs in ood_probs:
        ood.update({"entropy": entropy(set_probs)}, 1)
    metrics = {name: float(value) for name, value in {**classes.compute(), **ood.compute()}.items()}
    return Evaluation(probs, ood_probs, metrics)


def compare(
    folder: Path, seed: int = 0, progress: bool = False, overrides: Sequence[str] = ()
) -> tuple[dict[str, Evaluation], Fitted, Fitted]:
    """Train with Adam and with VOGN, and evaluate Adam, VOGN's posterior mean and VOGN's posterior."""
    adam = fit("digits+lenet5+adam", folder / "adam", seed, progress, overrides)
    vogn = fit("digits+lenet5+vogn", folder / "vogn", seed, progress, overrides)
    posterior = load_posterior(vogn.checkpoint)
    results = {
        "Adam": evaluate(adam),
        "VOGN mean": evaluate(vogn),
        f"VOGN MC ({SAMPLES})": evaluate(vogn, posterior),
    }
    return results, adam, vogn


def results_table(results: dict[str, Evaluation]) -> Table:
    """A table of the metrics in `COLUMNS`, one row per method."""
    title = "400 test digits; 800 out-of-distribution inputs"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for name, result in results.items():
        table.add_row(name, *(f"{result.metrics[metric]:.4f}" for metric in COLUMNS.values()))
    return table


def write_figures(results: dict[str, Evaluation], data: Any, folder: Path) -> list[Path]:
    """Draw the reliability diagram and the entropy histogram."""
    targets = data.test_set.tensors[1]
    names = ("digits", *data.ood_names)
    entropies = {
        model: dict(zip(names, (entropy(p) for p in (result.probs, *result.ood_probs)), strict=True))
        for model, result in results.items()
    }
    figures = {
        "reliability.png": reliability_diagram({name: (r.probs, targets) for name, r in results.items()}),
        "entropy.png": score_histograms(entropies, title="Predictive entropy"),
    }
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=120)
    return [folder / name for name in figures]


def main(arguments: Iterable[str] | None = None) -> None:
    """Run the demo with command-line arguments, by default the arguments of the process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("runs/demo"), help="output folder (default: runs/demo)")
    parser.add_argument("--seed", type=int, default=0, help="seed of initial weights and batch order (default: 0)")
    parser.add_argument("--epochs", type=int, help="epochs of both runs (default: as in the configs)")
    options = parser.parse_args(None if arguments is None else list(arguments))
    # Hide Lightning's hints about hardware and loggers; only the two progress bars remain.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated", FutureWarning)  # Lightning 2.6 with torch 2.15
    overrides = [] if options.epochs is None else [f"--trainer.max_epochs={options.epochs}"]
    console = Console()
    console.print("Training LeNet-5 on 1097 digits, first with Adam, then with VOGN:")
    results, adam, vogn = compare(options.root, options.seed, True, overrides)
    figures = write_figures(results, vogn.data, options.root)
    console.print(results_table(results))
    console.print(f"Training took {adam.seconds:.0f} s with Adam and {vogn.seconds:.0f} s with VOGN.")
    console.print(
        f"The data determine about {vogn.logged['posterior/effective_parameters']:.0f} parameters of VOGN's posterior. The "
        "curvature sets the shape of its noise; a heuristic sets the scale relative to the size of the weights."
    )
    for path in [*figures, vogn.checkpoint, options.root / "vogn" / "config.yaml"]:
        console.print(f"wrote {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
