"""Distributed steps: two ranks measured here, and a cost model up to 1,024 ranks.

    python -m benchmarks.scaling [--rounds 7] [--steps 20] [--json benchmarks/results/scaling_ranks.json]

Measured: LeNet-5 on batches of 32 noise images, in one process and on two gloo ranks, each on one thread. Adam, VOGN and
Noisy K-FAC are trained in turn, round by round, and a round's ratio to its own Adam (under plain DDP on two ranks) is kept.
On paper: ResNet-18 and ResNet-50 on ImageNet, with the assumptions printed above the table. See `benchmarks.cost_model`.
"""

from __future__ import annotations

import argparse
import json
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
from benchmarks.provenance import provenance
from lightning_bayes import BayesDDPStrategy, NoisyKFACCallback, VOGNCallback
from lightning_bayes.zoo.models import LeNet5

Row = dict[str, Any]
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
NETWORKS = {"ResNet-18": torchvision.models.resnet18, "ResNet-50": torchvision.models.resnet50}
WARM_UP = 3  # steps of a fit that are not counted


class Steps(Callback):
    """Notes when each batch has ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Look at the clock."""
        self.times.append(time.perf_counter())

    def seconds(self) -> float:
        """Median time of a step after the first few."""
        return statistics.median(b - a for a, b in zip(self.times[WARM_UP:], self.times[WARM_UP + 1 :], strict=False))


class Net(LightningModule):
    """LeNet-5 under Adam."""

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
    """The network that is measured."""
    return LeNet5(num_classes=10, in_channels=3, image_size=32)


def measure_on_rank(rank: int, ranks: int, rounds: int, steps: int) -> Row:
    """Time the methods in turn.

    Args:
        rank: Which process this is.
        ranks: Number of processes.
        rounds: How often each method has its turn.
        steps: Steps of a turn.

    Returns:
        Seconds of a step by method, one value for each round, and the bytes that the methods reduced.
    """
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32 * ranks * steps, 3, 32, 32), torch.randint(10, (32 * ranks * steps,)))
    seconds: dict[str, list[float]] = {"adam": [], "vogn": [], "noisy-kfac": []}
    found: dict[str, int | None] = {}
    for _ in range(rounds):
        for method, values in seconds.items():
            callbacks = {"adam": [], "vogn": [VOGNCallback(curvature_interval=1)], "noisy-kfac": [NoisyKFACCallback()]}[
                method
            ]
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
            found[method] = trainer.strategy.reduced_bytes if isinstance(trainer.strategy, BayesDDPStrategy) else None
    return {"seconds": seconds, "bytes": found}


def measure(ranks: int, rounds: int, steps: int) -> Row:
    """Time the methods in processes of their own.

    Args:
        ranks: Number of processes.
        rounds: How often each method has its turn.
        steps: Steps of a turn.

    Returns:
        Median seconds of a step on the first rank, median of the rounds' ratios to Adam, bytes.

    Raises:
        RuntimeError: If a process fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes = finish(start(measure_on_rank, ranks, folder, ranks, rounds, steps), 600)
        if any(codes):
            raise RuntimeError(f"{ranks} rank(s) ended with {codes}:\n{(folder / 'rank0.log').read_text('utf-8')}")
        found = results(ranks, folder)[0]
    seconds = found["seconds"]
    ratios = {m: [v / adam for v, adam in zip(seconds[m], seconds["adam"], strict=True)] for m in seconds}
    return {
        "ranks": ranks,
        "seconds": {method: statistics.median(values) for method, values in seconds.items()},
        "ratios": {method: statistics.median(values) for method, values in ratios.items()},
        "quartiles": {m: statistics.quantiles(v, n=4)[::2] for m, v in ratios.items()} if rounds > 1 else None,
        "bytes": found["bytes"],
    }


def on_paper(network: Network, method: Any, ratio: float, machine: Machine, every: Intervals) -> list[Row]:
    """The cost model's rows for one network and method.

    Args:
        network: The network.
        method: As in `benchmarks.cost_model`.
        ratio: Step of VOGN in units of Adam's.
        machine: The assumptions.
        every: How often K-FAC measures and inverts.

    Returns:
        One row for each number of ranks: seconds, and the share of perfect scaling that is left.
    """
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
    """Print both rows, and how much the second process costs beyond what it costs Adam."""
    for row in rows:
        cells = (f"{m} {1e3 * s:.1f} ms ({row['ratios'][m]:.3f} × Adam)" for m, s in row["seconds"].items())
        print(f"measured, {row['ranks']} rank(s): " + ", ".join(cells))
    for method in ("vogn", "noisy-kfac"):
        change = rows[1]["ratios"][method] / rows[0]["ratios"][method] - 1
        print(f"{method}: the ratio to Adam under plain DDP at two ranks is {change:+.1%} of that in one process")


def print_paper(name: str, method: str, network: Network, rows: list[Row]) -> None:
    """Print one table of the cost model."""
    size = reduced_bytes(network, method) / 2**20  # type: ignore[arg-type]
    print(f"\n{name}, {method}: {network.parameters / 1e6:.1f} M parameters, {size:.0f} MiB a reduction that measures")
    print(f"{'ranks':>6}{'arithmetic ms':>15}{'communication ms':>18}{'efficiency':>12}")
    for row in rows:
        print(
            f"{row['ranks']:6}{1e3 * row['arithmetic']:15.1f}{1e3 * row['communication']:18.2f}{row['efficiency']:12.1%}"
        )


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the model's tables, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    measured = [measure(ranks, options.rounds, options.steps) for ranks in (1, 2)]
    print_measured(measured)
    machine, every = Machine(), Intervals()
    print(f"\nOn paper, of {machine} and {every}; VOGN's step in units of Adam's as measured in one process.")
    paper = []
    for name, build in NETWORKS.items():
        with torch.device("meta"):
            network = describe(build(), (3, 224, 224))
        for method in ("vogn", "noisy-kfac"):
            rows = on_paper(network, method, measured[0]["ratios"]["vogn"], machine, every)
            print_paper(name, method, network, rows)
            paper.append({"network": name, "method": method, "rows": rows})
    if options.json:
        kept = {**provenance(), "machine_on_paper": asdict(machine), "intervals": asdict(every)}
        options.json.write_text(json.dumps({**kept, "measured": measured, "paper": paper}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
