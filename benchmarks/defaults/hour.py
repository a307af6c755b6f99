"""What each callback makes of a user's first classifier: a ResNet with BatchNorm on 3,000 images of CIFAR-10.

    python -m benchmarks.defaults.hour --root DATA [--methods adamw VOGNCallback()] [--first-seed 900] [--seeds 3]
        [--json FILE] [--table]

`DATA` has torchvision's folder of CIFAR-10, and SVHN's ``test_32x32.mat``. A seed draws the images, 500 of them for
validation, and the initial weights. 2,000 test images score a method, 2,000 of SVHN are out of distribution. Every callback
has its defaults. ``adamw, T`` divides the logits by the temperature with the lowest validation NLL. Seconds are those of the
processor, for the fit and what ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.defaults.mode_problems import Block, cifar_images, cosine
from benchmarks.defaults.study import Record, run_study, study_parser
from benchmarks.defaults.users import UserModule, fit, outputs_of
from benchmarks.over_seeds import paired_table
from benchmarks.quiet import quiet
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


def own() -> UserModule:
    """A user's module with new weights, AdamW and a cosine schedule."""
    stem = (nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    blocks = (Block(16, 32, 2, nn.BatchNorm2d), Block(32, 64, 2, nn.BatchNorm2d))
    net = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return UserModule(net, lambda module: cosine(torch.optim.AdamW(module.parameters(), RATE), EPOCHS))


class Sets(NamedTuple):
    """The four parts of the images, with labels; those out of distribution have none."""

    train: TensorDataset
    val: TensorDataset
    test: TensorDataset
    ood: TensorDataset


@cache
def sets_of(root: Path, seed: int) -> Sets:
    """Standardised images that a seed draws."""
    (x, y), (test_x, test_y), ood = cifar_images(root)
    generator = torch.Generator().manual_seed(seed)
    first, second, third = (torch.randperm(len(part), generator=generator) for part in (y, test_y, ood))
    train, val = first[: SIZES["train"]], first[SIZES["train"] :][: SIZES["val"]]
    second, third = second[: SIZES["test"]], third[: SIZES["ood"]]
    std, mean = torch.std_mean(x[train], (0, 2, 3), keepdim=True)
    parts = ((x[train], y[train]), (x[val], y[val]), (test_x[second], test_y[second]), (ood[third], third))
    return Sets(*(TensorDataset((images - mean) / std, labels) for images, labels in parts))


def run(root: Path, method: str, seed: int) -> Iterator[Record]:
    """Fit as a user does, and score what `Trainer.predict` returns; AdamW also with a temperature of its own."""
    yield from scored(sets_of(root, seed), method, seed)


def scored(data: Sets, method: str, seed: int) -> Iterator[Record]:
    """The scores of one fit on these images."""
    seed_everything(seed, verbose=False)
    module, callback, start = own(), METHODS[method](), time.process_time()
    trainer = fit(module, data.train, BATCH, EPOCHS, [callback], data.val)
    seconds, labels = {"seconds": time.process_time() - start}, data.test.tensors[1]
    if callback is not None:
        found = [_predicted(trainer, module, each) for each in (data.test, data.ood)]
        yield {**_scores(*found, labels), **seconds}
        return
    val, test, ood = (outputs_of(module, each.tensors[0]) for each in (data.val, data.test, data.ood))
    for name, t in ((method, 1.0), (f"{method}, T", fit_temperature(val, data.val.tensors[1]))):
        yield {"method": name, **_scores(_of_logits(test / t), _of_logits(ood / t), labels), **seconds}


def _predicted(trainer: Trainer, module: UserModule, data: TensorDataset) -> dict[str, Tensor]:
    """The columns that `Trainer.predict` returns."""
    with quiet():
        batches: Any = trainer.predict(module, DataLoader(data, 500))
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


def main() -> None:
    """Run the missing fits, save them, and print the table."""
    options = study_parser(__doc__, first_seed=900, seeds=3, methods=METHODS).parse_args()
    print(paired_table(run_study(options, ("methods",), run), SCORES, "adamw, T", ("NLL",)))


if __name__ == "__main__":
    main()
