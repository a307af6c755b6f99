"""What each callback makes of a user's first classifier: a ResNet with BatchNorm on 3,000 images of CIFAR-10.

    python -m benchmarks.defaults.hour --root DATA [--methods adamw VOGNCallback()] [--first-seed 900] [--seeds 3]
        [--json FILE] [--table]

`DATA` has torchvision's folder of CIFAR-10, and SVHN's ``test_32x32.mat``. A seed draws the images, 500 of them for
validation, and the initial weights. 2,000 test images score a method, 2,000 of SVHN are out of distribution. Every callback
has its defaults. ``adamw, T`` divides the logits by the temperature with the lowest validation NLL. Seconds are those of the
processor, for the fit and what ends it. Rows that are in the JSON file are skipped.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.defaults.mode_problems import Block, cifar_images
from benchmarks.over_seeds import mean_and_error
from benchmarks.provenance import save_json, saved_rows
from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes import Calibration, DeepEnsembleCallback, LaplaceCallback, MultiModeCallback, VOGNCallback
from lightning_bayes.metrics import expected_calibration_error, ood_auroc
from lightning_bayes.predictive import entropy, fit_temperature

EPOCHS, BATCH, RATE = 15, 64, 3e-3
SIZES: Final = {"train": 3_000, "val": 500, "test": 2_000, "ood": 2_000}
METHODS: Final[dict[str, Callable[[], Callback | None]]] = {
    "adamw": lambda: None,
    "Calibration()": Calibration,
    "VOGNCallback()": VOGNCallback,
    "VOGNCallback(calibrate=True)": lambda: VOGNCallback(calibrate=True),
    "LaplaceCallback()": LaplaceCallback,
    "MultiModeCallback()": MultiModeCallback,
    "DeepEnsembleCallback(3)": lambda: DeepEnsembleCallback(3),
}
SCORES: Final = ("accuracy", "NLL", "ECE", "AUROC, entropy", "AUROC, MI", "seconds")
Record = dict[str, Any]


class Own(LightningModule):
    """A user's module, which knows nothing of the package."""

    def __init__(self) -> None:
        super().__init__()
        stem = (nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        blocks = (Block(16, 32, 2, nn.BatchNorm2d), Block(32, 64, 2, nn.BatchNorm2d))
        self.net = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, 10]``."""
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The mean cross-entropy."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the loss."""
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        """AdamW with a cosine schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), RATE)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]


class Loaders(NamedTuple):
    """The four parts of the images."""

    train: DataLoader[Any]
    val: DataLoader[Any]
    test: DataLoader[Any]
    ood: DataLoader[Any]


@cache
def loaders(root: Path, seed: int) -> Loaders:
    """Standardised images that a seed draws."""
    (x, y), (test_x, test_y), ood = cifar_images(root)
    generator = torch.Generator().manual_seed(seed)
    first, second, third = (torch.randperm(len(part), generator=generator) for part in (y, test_y, ood))
    train, val = first[: SIZES["train"]], first[SIZES["train"] :][: SIZES["val"]]
    second, third = second[: SIZES["test"]], third[: SIZES["ood"]]
    std, mean = torch.std_mean(x[train], (0, 2, 3), keepdim=True)
    parts = ((x[train], y[train]), (x[val], y[val]), (test_x[second], test_y[second]), (ood[third], third))
    sets = [TensorDataset((images - mean) / std, labels) for images, labels in parts]
    return Loaders(*(DataLoader(data, BATCH if data is sets[0] else 500, data is sets[0]) for data in sets))


def run(method: str, data: Loaders, seed: int) -> dict[str, Record]:
    """Fit as a user does, and score what `Trainer.predict` returns; AdamW also with a temperature of its own."""
    seed_everything(seed, verbose=False)
    module, callback, start = Own(), METHODS[method](), time.process_time()
    with quiet():
        trainer = quiet_trainer([callback], EPOCHS)
        trainer.fit(module, data.train, data.val)
        seconds = time.process_time() - start
        labels, is_alone = torch.cat([y for _, y in data.test]), callback is None
        found = {part: _predicted(trainer, module, getattr(data, part), is_alone) for part in ("test", "ood")}
        if not is_alone:
            return {method: {**_scores(found["test"], found["ood"], labels), "seconds": seconds}}
        logits = {name: each["outputs"] for name, each in found.items()}
        val = _predicted(trainer, module, data.val, is_alone)["outputs"]
    temperature = fit_temperature(val, torch.cat([y for _, y in data.val]))
    both = {method: 1.0, f"{method}, T": temperature}
    return {
        name: {**_scores(_of_logits(logits["test"] / t), _of_logits(logits["ood"] / t), labels), "seconds": seconds}
        for name, t in both.items()
    }


def _predicted(trainer: Trainer, module: Own, loader: DataLoader[Any], is_alone: bool) -> dict[str, Tensor]:
    """The columns that `Trainer.predict` returns under a callback, or the logits of a network alone."""
    if is_alone:
        with torch.no_grad():
            module.eval()
            return {"outputs": torch.cat([module(x) for x, _ in loader])}
    batches: Any = trainer.predict(module, loader)
    return {name: torch.cat([batch[name] for batch in batches]) for name in ("probs", "entropy", "mutual_information")}


def _of_logits(logits: Tensor) -> dict[str, Tensor]:
    probs = logits.softmax(-1)
    return {"probs": probs, "entropy": entropy(probs)}


def _scores(test: dict[str, Tensor], ood: dict[str, Tensor], labels: Tensor) -> Record:
    probs, is_ood = test["probs"].double(), torch.arange(len(labels) + len(ood["probs"])) >= len(labels)
    columns = {"AUROC, entropy": "entropy", "AUROC, MI": "mutual_information"}
    auroc = {
        name: float(ood_auroc(torch.cat([test[column], ood[column]]), is_ood))
        for name, column in columns.items()
        if column in test
    }
    nll = F.nll_loss(probs.log(), labels)
    accuracy = (probs.argmax(-1) == labels).double().mean()
    return {
        "accuracy": float(accuracy),
        "NLL": float(nll),
        "ECE": float(expected_calibration_error(probs, labels)),
        **auroc,
    }


def table(rows: Sequence[Record]) -> str:
    """Means of each method, and the paired differences of accuracy, NLL and ECE from AdamW with its own temperature."""
    of: dict[str, dict[int, Record]] = {}
    for row in rows:
        of.setdefault(row["method"], {})[row["seed"]] = row
    lines = [f"| | {' | '.join(SCORES)} | NLL - that of AdamW, T |", "|" + "---|" * (len(SCORES) + 2)]
    for method, runs in of.items():
        cells = [_mean([row[name] for row in runs.values() if name in row], name) for name in SCORES]
        seeds = sorted(runs.keys() & of["adamw, T"].keys())
        change = mean_and_error([runs[seed]["NLL"] - of["adamw, T"][seed]["NLL"] for seed in seeds], "+")
        lines.append(f"| {method} | {' | '.join(cells)} | {change} |")
    return "\n".join(lines)


def _mean(values: Sequence[float], name: str) -> str:
    if not values:
        return "–"
    return f"{statistics.mean(values):.0f}" if name == "seconds" else mean_and_error(values)


def main() -> None:
    """Run the missing fits, save them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--first-seed", type=int, default=900)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true", help="only print the file")
    options = parser.parse_args()
    rows: list[Record] = saved_rows(options.json)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for seed, method in [] if options.table else product(seeds, options.methods):
        if not any((row["method"], row["seed"]) == (method, seed) for row in rows):
            found = run(method, loaders(options.root, seed), seed)
            rows += [{"method": name, "seed": seed, **scores} for name, scores in found.items()]
            save_json(options.json, {"results": rows})
            print(*(f"{name}, seed {seed}: {scores}" for name, scores in found.items()), sep="\n", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
