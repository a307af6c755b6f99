"""The demo: LeNet-5 on scikit-learn's digits, trained with Adam and with VOGN, and compared.

``lightning-bayes demo`` trains with the configs ``digits+lenet5+adam`` and ``digits+lenet5+vogn``, and tests both.
A picture at the end compares the posterior with Adam, without and with a temperature.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure, SubFigure
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_bayes.cli.bayes_cli import instantiate
from lightning_bayes.metrics import OODDetection, classification_metrics
from lightning_bayes.metrics.figure_style import BLUE, DPI, GREY, ORANGE, quiet_frame
from lightning_bayes.predictive import fit_temperature

SURE, INPUTS = 0.9, 7  # of the picture: a high probability, and the number of inputs shown
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
    images: list[Tensor]  # of the test set and of the out-of-distribution sets, [inputs, 1, 8, 8], in [0, 1]
    targets: Tensor  # of the test set
    probs: list[Tensor]  # for each set, [inputs, classes]
    tempered: list[Tensor]  # the same with a temperature that was fitted on the validation set; empty for samples

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
    return Fitted(folder / "checkpoints" / "last.ckpt", seconds, values, *_predicted(run))


def _predicted(run: Any) -> tuple[list[Tensor], Tensor, list[Tensor], list[Tensor]]:
    """The images, the targets of the test set, and the predictions without and with a temperature."""
    data = run.datamodule
    sets = [data.test_set, *data.read_ood_sets()]
    outputs = [_joined(batches) for batches in run.trainer.predict(run.model, datamodule=data)]
    images = [dataset.tensors[0] * data.std + data.mean for dataset in sets]
    targets = data.test_set.tensors[1]
    if isinstance(run.trainer.predict_loop.predictions[0][0], dict):  # averages of samples, not logits
        return images, targets, outputs, []
    validation = _joined(run.trainer.predict(run.model, data.val_dataloader()))
    temperature = fit_temperature(validation, data.val_set.tensors[1])
    probs, tempered = ([(each / divisor).softmax(-1) for each in outputs] for divisor in (1.0, temperature))
    return images, targets, probs, tempered


def _joined(batches: Sequence[Any]) -> Tensor:
    """The logits or probabilities of all batches."""
    return torch.cat([batch["probs"] if isinstance(batch, dict) else batch for batch in batches])


def compare(
    folder: Path, seed: int = 0, progress: bool = False, overrides: Sequence[str] = ()
) -> tuple[dict[str, dict[str, float]], Fitted, Fitted]:
    """Train with Adam and with VOGN; the metrics of Adam, of VOGN's posterior mean and of VOGN's posterior."""
    adam = fit("digits+lenet5+adam", folder / "adam", seed, progress, overrides)
    samples = f"--trainer.callbacks.eval_samples={SAMPLES}"
    vogn = fit("digits+lenet5+vogn", folder / "vogn", seed, progress, [samples, *overrides])
    results = {
        "Adam": adam.metrics(),
        "Adam, T": scores(adam.tempered, adam.targets),
        "VOGN mean": vogn.metrics("_mean"),
        f"VOGN MC ({SAMPLES})": vogn.metrics(),
    }
    return results, adam, vogn


def scores(probs: Sequence[Tensor], targets: Tensor) -> dict[str, float]:
    """The metrics in `COLUMNS` of probabilities for the test set and for the out-of-distribution sets."""
    metrics, detection = classification_metrics(probs[0].shape[-1], ""), OODDetection(["all"], ["entropy"])
    metrics.update(probs[0], targets)
    for number, of_set in enumerate(probs):
        detection.update({"entropy": torch.special.entr(of_set).sum(-1)}, min(number, 1))
    found = {**metrics.compute(), **detection.compute()}
    return {key: float(found[key]) for key in COLUMNS.values()}


def picture(adam: Fitted, vogn: Fitted) -> Figure:
    """What the posterior changes: NLL and calibration of the digits, and confidence on inputs that are not digits."""
    drawn = Figure(figsize=(9.6, 5.6), dpi=DPI, layout="constrained")
    halves: Any = drawn.subfigures(2, 1, height_ratios=[1.3, 1])
    above, below = halves
    sides = {"Adam": adam.probs, "Adam,\ntemperature": adam.tempered, "VOGN": vogn.probs}
    found = {name: scores(probs, adam.targets) for name, probs in sides.items()}
    confident = {name: (torch.cat(probs[1:]).amax(-1) > SURE).float().mean().item() for name, probs in sides.items()}
    panels = {
        "NLL of the digits [nats]": [values["cls/NLL"] for values in found.values()],
        "ECE of the digits": [values["cal/ECE"] for values in found.values()],
        f"Non-digits with p > {SURE}": list(confident.values()),
    }
    for axes, (title, heights) in zip(above.subplots(1, len(panels)), panels.items(), strict=True):
        bars = axes.bar(list(sides), heights, color=[GREY, ORANGE, BLUE], width=0.6)
        axes.bar_label(bars, fmt="%.3f")
        axes.set_title(f"{title} ↓", pad=12)
        quiet_frame(axes)
    _draw_inputs(below, adam, vogn)
    return drawn


def _draw_inputs(figure: SubFigure, adam: Fitted, vogn: Fitted) -> None:
    """Inputs that are not digits, spread over those on which Adam with a temperature is confident."""
    images, before, after = (torch.cat(each[1:]) for each in (adam.images, adam.tempered, vogn.probs))
    surest = before.amax(-1).argsort(descending=True)
    count = max(INPUTS, int((before.amax(-1) > SURE).sum()))
    spread = surest[torch.linspace(0, count - 1, INPUTS).long()]
    figure.suptitle("Non-digits on which Adam with a temperature is confident: class and probability")
    for axes, index in zip(figure.subplots(1, INPUTS), spread.tolist(), strict=True):
        axes.imshow(images[index, 0].numpy(), cmap="gray_r", vmin=0, vmax=1)
        axes.set_axis_off()
        lines = [
            f"{name} {each[index].argmax()}: {each[index].amax():.2f}"
            for name, each in (("Adam", before), ("VOGN", after))
        ]
        axes.text(0.5, -0.1, "\n".join(lines), transform=axes.transAxes, ha="center", va="top")


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
    parser = argparse.ArgumentParser("lightning-bayes demo", description=__doc__.splitlines()[0])
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
    shown = options.root / "demo.png"
    picture(adam, vogn).savefig(shown)
    figures = sorted(options.root.glob("*/figures/*.png"))
    for path in [shown, *figures, vogn.checkpoint, options.root / "vogn" / "config.yaml"]:
        console.print(f"wrote {path}", soft_wrap=True)
