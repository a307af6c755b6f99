"""CIFAR-10 compared with Table 1 of Osawa et al. 2019: all metrics of each method at equal epochs.

    python -m benchmarks.papers.cifar10 --root DATA --model lenet --epochs 30 [--methods adam vogn] [--ood svhn]
        [--settings published] [--json benchmarks/results/cifar10.json]
    python -m benchmarks.papers.cifar10 --json benchmarks/results/cifar10.json --table

Runs that are already in the JSON file are skipped. Settings are the defaults of the callbacks with Adam at 1e-3, or those
that Osawa et al. released (Zhang et al. for Noisy K-FAC on VGG16).
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import MultiStepLR

from benchmarks.over_seeds import mean_and_error
from benchmarks.papers import PUBLISHED
from benchmarks.provenance import provenance, save_json, saved_rows
from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes import (
    BBBCallback,
    DeepEnsembleCallback,
    LaplaceCallback,
    MCDropoutCallback,
    NoisyKFACCallback,
    OGNCallback,
    SWAGCallback,
    VariationalCallback,
    VOGNCallback,
)
from lightning_bayes.errors import BayesError
from lightning_bayes.zoo import BayesClassifier, CIFAR10DataModule, create_model


@dataclass(frozen=True)
class Network:
    """One network and its published setting."""

    name: str
    batch: int
    augment: bool
    decays: bool
    adam_decay: float
    presets: Mapping[str, str]
    dropout: float = 0.1
    drops: tuple[type[nn.Module], ...] = (nn.Conv2d, nn.Linear)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sgd: tuple[float, float] = (0.1, 1e-4)  # learning rate and weight decay

    def build(self) -> nn.Module:
        """The network with random weights."""
        return create_model(self.name, num_classes=10, in_channels=3, **self.arguments)


_OSAWA = "osawa2019-cifar10"
NETWORKS: Final[dict[str, Network]] = {
    "lenet": Network(
        "lenet5", 128, False, False, 0.01, {"vogn": f"{_OSAWA}-lenet"}, arguments={"image_size": 32}, sgd=(1e-3, 0.01)
    ),
    "alexnet": Network(
        "alexnet", 256, True, True, 1e-4, dict.fromkeys(("vogn", "noisy_kfac"), f"{_OSAWA}-alexnet"), 0.5, (nn.Conv2d,)
    ),
    "resnet18": Network(
        "resnet18", 256, True, True, 5e-4, {"vogn": f"{_OSAWA}-resnet18"}, arguments={"stem": "imagenet"}
    ),
    "vgg16": Network(
        "vgg16_half", 128, True, True, 1e-4,
        {"vogn": f"{_OSAWA}-vgg19", "noisy_kfac": "zhang2018-cifar10-vgg16-augmented-batchnorm"},
    ),
}  # fmt: skip


def dropout_layers(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> str:
    """A regular expression that matches the names of all layers of the given types."""
    return "|".join(re.escape(name) for name, layer in module.named_modules() if isinstance(layer, kinds))


Settings = Literal["default", "published"]
Build = Callable[[Iterable[nn.Parameter]], Optimizer]

VARIATIONAL: Final[dict[str, type[VariationalCallback]]] = {
    "bbb": BBBCallback,
    "ogn": OGNCallback,
    "vogn": VOGNCallback,
    "noisy_kfac": NoisyKFACCallback,
}
POSTHOC: Final[dict[str, Callable[..., Callback]]] = {"laplace": LaplaceCallback, "swag": SWAGCallback}
METHODS: Final = {
    "sgd": "SGD",
    "adam": "Adam",
    "mc_dropout": "MC-dropout",
    "bbb": "BBB",
    "ogn": "OGN",
    "vogn": "VOGN",
    "noisy_kfac": "Noisy K-FAC",
    "laplace": "Laplace on Adam",
    "swag": "SWAG on Adam",
    "ensemble": "Ensemble of 5 by Adam",
}
MEMBERS: Final = 5  # size of the ensemble


def why_not(model: str, method: str, settings: Settings) -> str:
    """The reason why a method cannot run with these settings; empty if it can."""
    network = NETWORKS[model]
    supported = {"sgd", "adam", *network.presets, *({"mc_dropout"} if model != "resnet18" else ())}
    return "no published setting" if settings == "published" and method not in supported else ""


def optimizer(network: Network, method: str, settings: Settings) -> Build:
    """The constructor of the module's optimizer under the given settings."""
    published = settings == "published" and method in {"sgd", "adam", "mc_dropout"}
    if method == "sgd":
        lr, decay = network.sgd if published else (0.05, 0.0)
        return lambda parameters: SGD(parameters, lr=lr, momentum=0.9, weight_decay=decay)
    decay = network.adam_decay if published else 0.0
    return lambda parameters: Adam(parameters, lr=1e-3, weight_decay=decay)


def callback(
    network: Network, method: str, settings: Settings, module: nn.Module, augmentation_factor: float, **overrides: Any
) -> Callback | None:
    """Build the callback of a method."""
    if method == "mc_dropout":
        return MCDropoutCallback(p=network.dropout, layers=dropout_layers(module, network.drops), **overrides)
    if method in POSTHOC:
        return POSTHOC[method](**overrides)
    if method not in VARIATIONAL:
        return None
    if settings == "published":
        return VARIATIONAL[method].from_preset(network.presets[method], **overrides)
    return VARIATIONAL[method](data_augmentation_factor=augmentation_factor, **overrides)


class Run(NamedTuple):
    """The specification of a run, without the machine."""

    model: str
    method: str
    settings: Settings
    augment: bool
    epochs: int
    seed: int


def train_and_test(run: Run, root: str, ood: tuple[str, ...], accelerator: str, num_workers: int) -> dict[str, Any]:
    """Train once and measure."""
    network = NETWORKS[run.model]
    data = CIFAR10DataModule(root, False, network.batch, num_workers, val_size=0, augment=run.augment, ood=ood)
    start = time.perf_counter(), time.process_time()
    with quiet(), TemporaryDirectory() as folder:
        if run.method == "ensemble":
            members = [Path(folder) / f"{member}.ckpt" for member in range(MEMBERS)]
            for number, path in enumerate(members):
                _fit(run._replace(seed=run.seed + 1000 * number), data, accelerator)[0].save_checkpoint(path)
            trainer, task = quiet_trainer([DeepEnsembleCallback(members)], 0, accelerator), _task(network, run)
        else:
            trainer, task = _fit(run, data, accelerator)
        seconds, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
        trainer.test(task, datamodule=data, verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    cost = {"seconds": round(seconds / run.epochs, 2), "cpu_seconds": round(cpu / run.epochs, 2)}
    return {**run._asdict(), "ood": [Path(entry).name for entry in ood], "metrics": metrics, **cost}


def _fit(run: Run, data: CIFAR10DataModule, accelerator: str) -> tuple[Trainer, BayesClassifier]:
    seed_everything(run.seed, verbose=False)
    network = NETWORKS[run.model]
    task = _task(network, run)
    method_callback = callback(network, run.method, run.settings, task, data.data_augmentation_factor, seed=run.seed)
    trainer = quiet_trainer([method_callback], run.epochs, accelerator)
    trainer.fit(task, datamodule=data)
    return trainer, task


def _task(network: Network, run: Run) -> BayesClassifier:
    milestones = [round(run.epochs * fraction) for fraction in (0.5, 0.75)]
    schedule = partial(MultiStepLR, milestones=milestones) if network.decays else None
    build_optimizer = optimizer(network, run.method, run.settings)
    return BayesClassifier(network.build(), num_classes=10, optimizer=build_optimizer, lr_scheduler=schedule)


# Logged name → column; AUROC is that of misclassification detection.
COLUMNS: Final = {
    "test/cls/Acc": "accuracy ↑",
    "test/cls/NLL": "NLL ↓",
    "test/cal/ECE": "ECE ↓",
    "test/mis/AUROC": "AUROC ↑",
    "ood/AUROC": "OOD AUROC ↑",
}
Record = dict[str, Any]  # result of `training.train_and_test`, as stored in JSON


def table(records: list[Record]) -> str:
    """Format a Markdown table: for each model, means ± standard errors over seeds, then the published rows."""
    head = ["model", "method", "settings", *COLUMNS.values(), "epochs", "s/epoch (CPU, clock)", "seeds"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for model, augment in product(NETWORKS, (False, True)):
        group = [r for r in records if (r["model"], r["augment"]) == (model, augment)]
        name = f"{model}, {'augmented' if augment else 'not augmented'}"
        lines += [f"| {name} | {line}" for line in _measured(group)]
        lines += [f"| {name} | {_published(row)}" for row in PUBLISHED["cifar10"].get(name, ()) if group]
    return "\n".join(lines)


def _measured(records: list[Record]) -> Iterator[str]:
    groups: dict[tuple[str, str, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record["method"], record["settings"], record["epochs"]), []).append(record)
    order = list(METHODS)
    for (method, settings, epochs), group in sorted(
        groups.items(), key=lambda item: (item[0][1:], order.index(item[0][0]))
    ):
        cells = [_cell([r["metrics"].get(name, math.nan) for r in group]) for name in COLUMNS]
        cpu, seconds = (statistics.mean(r[cost] for r in group) for cost in ("cpu_seconds", "seconds"))
        yield f"{METHODS[method]} | {settings} | {' | '.join(cells)} | {epochs} | {cpu:.1f}, {seconds:.1f} | {len(group)} |"


def _cell(values: list[float]) -> str:
    return "–" if any(map(math.isnan, values)) else mean_and_error(values)


def _published(row: Record) -> str:
    scores = [row[name] for name in ("accuracy", "nll", "ece", "auroc")]
    cells = ["–" if value is None else f"{value:.4g}" for value in (*scores, None)]
    return f"*{row['method']}* | *{row['source']}* | {' | '.join(cells)} | {row['epochs'] or '–'} | – | – |"


def asked(options: argparse.Namespace) -> Iterator[Run]:
    """All requested runs. One seed of all methods is finished before the next seed starts."""
    augment = NETWORKS[options.model].augment if options.augment is None else options.augment
    for seed, method in product(range(options.first_seed, options.first_seed + options.seeds), options.methods):
        yield Run(options.model, method, options.settings, augment, options.epochs, seed)


def execute(run: Run, options: argparse.Namespace, runs: list[Record]) -> str:
    """Execute a run, store its result, and describe it, or the reason why it did not run, in one line."""
    if reason := why_not(run.model, run.method, run.settings):
        return f"not run: {reason}"
    try:
        record = train_and_test(run, str(options.root), tuple(options.ood), options.accelerator, options.num_workers)
    except BayesError as error:
        return f"not run: {type(error).__name__}: {error}"
    runs.append({**record, "device": _device(options.accelerator), "commit": provenance()["commit"]})
    return ", ".join(f"{name} {record['metrics'][name]:.4f}" for name in COLUMNS if name in record["metrics"])


def _device(accelerator: str) -> str:
    on_gpu = accelerator != "cpu" and torch.cuda.is_available()
    return torch.cuda.get_device_name() if on_gpu else f"cpu, {torch.get_num_threads()} threads"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--model", choices=NETWORKS, default="lenet")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--settings", choices=["default", "published"], default="default")
    parser.add_argument("--augment", action=argparse.BooleanOptionalAction, help="crops and mirroring; as in the paper")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--ood", nargs="*", default=[], help="svhn, or folders of images")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, save it, and print the table."""
    options = _options(arguments)
    runs: list[Record] = saved_rows(options.json, "runs")
    for run in [] if options.table else asked(options):
        if any(run._asdict().items() <= known.items() for known in runs):
            continue
        print(f"{run.model} {run.method} seed {run.seed}: {execute(run, options, runs)}", flush=True)
        save_json(options.json, {"runs": runs})
    print(table(runs))


if __name__ == "__main__":
    main()
