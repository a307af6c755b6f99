"""The demo: LeNet-5 on scikit-learn's digits, trained with Adam and with VOGN, and compared.

``make demo`` runs it. It trains with the packaged configs ``digits+lenet5+adam`` and ``digits+lenet5+vogn``, and tests
both.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_bayes.cli import instantiate

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


class Fitted(NamedTuple):
    """A finished run."""

    checkpoint: Path
    seconds: float
    logged: dict[str, float]  # the last logged values of the fit and of the test

    def metrics(self, suffix: str = "") -> dict[str, float]:
        """The test metrics in `COLUMNS`; those of the posterior mean have the suffix ``_mean``."""
        stages = {"cls": f"test{suffix}/cls", "cal": f"test{suffix}/cal", "ood": f"ood{suffix}"}
        return {key: self.logged[f"{stages[key[:3]]}/{key[4:]}"] for key in COLUMNS.values()}


def fit(config: str, folder: Path, seed: int, progress: bool, overrides: Sequence[str] = ()) -> Fitted:
    """Train and test with a packaged config, and write checkpoint, config and figures to `folder`."""
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
    logged = dict(run.trainer.callback_metrics)
    run.trainer.test(run.model, datamodule=run.datamodule, verbose=False)
    values = {name: float(value) for name, value in {**logged, **run.trainer.callback_metrics}.items()}
    return Fitted(folder / "checkpoints" / "last.ckpt", seconds, values)


def compare(
    folder: Path, seed: int = 0, progress: bool = False, overrides: Sequence[str] = ()
) -> tuple[dict[str, dict[str, float]], Fitted, Fitted]:
    """Train with Adam and with VOGN; the metrics of Adam, of VOGN's posterior mean and of VOGN's posterior."""
    adam = fit("digits+lenet5+adam", folder / "adam", seed, progress, overrides)
    samples = f"--trainer.callbacks.eval_samples={SAMPLES}"
    vogn = fit("digits+lenet5+vogn", folder / "vogn", seed, progress, [samples, *overrides])
    results = {
        "Adam": adam.metrics(),
        "VOGN mean": vogn.metrics("_mean"),
        f"VOGN MC ({SAMPLES})": vogn.metrics(),
    }
    return results, adam, vogn


def results_table(results: dict[str, dict[str, float]]) -> Table:
    """A table of the metrics in `COLUMNS`, one row per method."""
    title = "400 test digits; 800 out-of-distribution inputs"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for name, metrics in results.items():
        table.add_row(name, *(f"{metrics[key]:.4f}" for key in COLUMNS.values()))
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo with command-line arguments, by default the arguments of the process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("runs/demo"), help="output folder (default: runs/demo)")
    parser.add_argument("--seed", type=int, default=0, help="seed of initial weights and batch order (default: 0)")
    parser.add_argument("--epochs", type=int, help="epochs of both runs (default: as in the configs)")
    options = parser.parse_args(arguments)
    # Hide Lightning's hints about hardware and loggers; only the two progress bars remain.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated", FutureWarning)  # Lightning 2.6 with torch 2.15
    overrides = [] if options.epochs is None else [f"--trainer.max_epochs={options.epochs}"]
    console = Console()
    console.print("Training LeNet-5 on 1097 digits, first with Adam, then with VOGN:")
    results, adam, vogn = compare(options.root, options.seed, True, overrides)
    console.print(results_table(results))
    console.print(f"Training took {adam.seconds:.0f} s with Adam and {vogn.seconds:.0f} s with VOGN.")
    console.print(
        f"The data determine about {vogn.logged['posterior/effective_parameters']:.0f} parameters of VOGN's posterior. The "
        "curvature sets the shape of its noise; a heuristic sets the scale relative to the size of the weights."
    )
    figures = sorted(options.root.glob("*/figures/*.png"))
    for path in [*figures, vogn.checkpoint, options.root / "vogn" / "config.yaml"]:
        console.print(f"wrote {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
