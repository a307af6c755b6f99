"""Distributed steps: two ranks measured here, and a cost model up to 1,024 ranks.

    python -m benchmarks.scaling [--rounds 7] [--steps 20] [--json benchmarks/results/scaling_ranks.json]

Measured: LeNet-5 on batches of 32 noise images, in one process and on two gloo ranks, with one thread each. Adam, VOGN and
Noisy K-FAC train in turn in every round; the ratio to Adam (with plain DDP on two ranks) is computed within a round.
Modelled: ResNet-18 and ResNet-50 on ImageNet, with the assumptions printed above the table. See `benchmarks.cost_model`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.cost_model import Intervals, Machine, Network, describe, reduced_bytes, step_seconds
from benchmarks.processes import finish, results, start
from benchmarks.provenance import save_json
from lightning_bayes import BayesDDPStrategy, NoisyKFACCallback, VOGNCallback
from lightning_bayes.zoo.models import LeNet5

Row = dict[str, Any]
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
NETWORKS = {"ResNet-18": torchvision.models.resnet18, "ResNet-50": torchvision.models.resnet50}
WARM_UP = 3  # initial steps that are not counted


class Steps(Callback):
    """Records the end time of each batch."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Record the time."""
        self.times.append(time.perf_counter())

    def seconds(self) -> float:
        """Median time of a step after the warm-up."""
        return statistics.median(b - a for a, b in zip(self.times[WARM_UP:], self.times[WARM_UP + 1 :], strict=False))


class Net(LightningModule):
    """LeNet-5 with Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.net = lenet()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, which a callback may replace."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def lenet() -> nn.Module:
    """The measured network."""
    return LeNet5(num_classes=10, in_channels=3, image_size=32)


def measure_on_rank(rank: int, ranks: int, rounds: int, steps: int) -> Row:
    """Time the methods in turn; seconds of a step, one value per round, and reduced bytes, both by method."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32 * ranks * steps, 3, 32, 32), torch.randint(10, (32 * ranks * steps,)))
    seconds: dict[str, list[float]] = {"adam": [], "vogn": [], "noisy-kfac": []}
    reduced: dict[str, int | None] = {}
    for _ in range(rounds):
        for method, values in seconds.items():
            callbacks = _callbacks(method)
            strategy = BayesDDPStrategy() if callbacks else "ddp"
            watch = Steps()
            trainer = Trainer(
                callbacks=[*callbacks, watch],
                strategy=strategy if ranks > 1 else "auto",
                devices=ranks,
                accelerator="cpu",
                max_epochs=1,
                barebones=True,
            )
            trainer.fit(Net(), DataLoader(data, batch_size=32))
            values.append(watch.seconds())
            strategy = trainer.strategy
            reduced[method] = strategy.reduced_bytes if isinstance(strategy, BayesDDPStrategy) else None
    return {"seconds": seconds, "bytes": reduced}


def _callbacks(method: str) -> list[Callback]:
    if method == "adam":
        return []
    return [VOGNCallback(curvature_interval=1) if method == "vogn" else NoisyKFACCallback()]


def measure(ranks: int, rounds: int, steps: int) -> Row:
    """Time the methods in new processes; medians of seconds and of ratios to Adam, and reduced bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes = finish(start(measure_on_rank, ranks, folder, ranks, rounds, steps), 600)
        if any(codes):
            raise RuntimeError(f"{ranks} rank(s) ended with {codes}:\n{(folder / 'rank0.log').read_text('utf-8')}")
        first_rank = results(ranks, folder)[0]
    seconds = first_rank["seconds"]
    ratios = {m: [v / adam for v, adam in zip(seconds[m], seconds["adam"], strict=True)] for m in seconds}
    return {
        "ranks": ranks,
        "seconds": {method: statistics.median(values) for method, values in seconds.items()},
        "ratios": {method: statistics.median(values) for method, values in ratios.items()},
        "quartiles": {m: statistics.quantiles(v, n=4)[::2] for m, v in ratios.items()} if rounds > 1 else None,
        "bytes": first_rank["bytes"],
    }


def on_paper(network: Network, method: Any, ratio: float, machine: Machine, every: Intervals) -> list[Row]:
    """One row of the cost model per number of ranks, with the efficiency relative to perfect scaling."""
    rows = []
    for ranks in RANKS:
        alone, _ = step_seconds(network, method, 1, ratio, machine, every)
        arithmetic, communication = step_seconds(network, method, ranks, ratio, machine, every)
        total = arithmetic + communication
        rows.append(
            {"ranks": ranks, "arithmetic": arithmetic, "communication": communication, "efficiency": alone / total}
        )
    return rows


def print_measured(rows: list[Row]) -> None:
    """Print both rows, and the additional cost of a second process compared with Adam."""
    for row in rows:
        cells = (f"{m} {1e3 * s:.1f} ms ({row['ratios'][m]:.3f} × Adam)" for m, s in row["seconds"].items())
        print(f"measured, {row['ranks']} rank(s): " + ", ".join(cells))
    for method in ("vogn", "noisy-kfac"):
        change = rows[1]["ratios"][method] / rows[0]["ratios"][method] - 1
        print(
            f"{method}: the ratio to Adam with plain DDP on two ranks differs by {change:+.1%} from that in one process"
        )


def print_paper(name: str, method: str, network: Network, rows: list[Row]) -> None:
    """Print one table of the cost model."""
    size = reduced_bytes(network, method) / 2**20  # type: ignore[arg-type]
    print(
        f"\n{name}, {method}: {network.parameters / 1e6:.1f} M parameters, {size:.0f} MiB per reduction with a measurement"
    )
    print(f"{'ranks':>6}{'arithmetic ms':>15}{'communication ms':>18}{'efficiency':>12}")
    for row in rows:
        print(
            f"{row['ranks']:6}{1e3 * row['arithmetic']:15.1f}{1e3 * row['communication']:18.2f}{row['efficiency']:12.1%}"
        )


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the tables of the cost model, and write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    measured = [measure(ranks, options.rounds, options.steps) for ranks in (1, 2)]
    print_measured(measured)
    machine, every = Machine(), Intervals()
    print(
        f"\nCost model with {machine} and {every}; the step of VOGN relative to Adam is the one measured in one process."
    )
    paper = []
    for name, build in NETWORKS.items():
        with torch.device("meta"):
            network = describe(build(), (3, 224, 224))
        for method in ("vogn", "noisy-kfac"):
            rows = on_paper(network, method, measured[0]["ratios"]["vogn"], machine, every)
            print_paper(name, method, network, rows)
            paper.append({"network": name, "method": method, "rows": rows})
    header = {"machine_on_paper": asdict(machine), "intervals": asdict(every)}
    save_json(options.json, {**header, "measured": measured, "paper": paper})


if __name__ == "__main__":
    main()
