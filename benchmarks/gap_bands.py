"""Width of the predictive band in a gap of the data and on the data, for callbacks with their default settings.

    python -m benchmarks.gap_bands --first-seed 100 --seeds 5 --json benchmarks/results/gap_bands.json

A network of 50 tanh units is fitted to 80 points on two sides of a gap, y = sin 4x + 0.3 x + N(0, 0.1²). The ratio is the
mean standard deviation of f(x) over the gap, divided by that over new points of the training distribution. Each seed draws
the data and the initial weights. No setting was chosen on seeds from 100 on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.over_seeds import mean_and_error
from benchmarks.provenance import save_json
from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes import LaplaceCallback, VOGNCallback
from lightning_bayes.zoo import BayesRegressor

NOISE = 0.1
METHODS: dict[str, Callable[[], Callback]] = {
    "LaplaceCallback()": LaplaceCallback,
    "LaplaceCallback(subset='all')": lambda: LaplaceCallback(subset="all"),
    "VOGNCallback()": VOGNCallback,
}


class Curve:
    """Points on the curve, on both sides of the gap or in it."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, count: int, low: float = 0.4, high: float = 1.0) -> TensorDataset:
        """Inputs whose absolute value is uniform between `low` and `high`, and targets."""
        x = low + (high - low) * torch.rand(count, 1, generator=self.generator)
        x = x * (1 - 2 * torch.randint(2, x.shape, generator=self.generator))
        noise = NOISE * torch.randn(x.shape, generator=self.generator)
        return TensorDataset(x, torch.sin(4 * x) + 0.3 * x + noise)


def scores(method: str, seed: int, epochs: int) -> dict[str, object]:
    """Ratio of the bands, and NLL on both sides of the gap and in it, of one fit."""
    curve = Curve(seed)
    train, new, gap = curve.draw(80), curve.draw(2000), curve.draw(2000, 0.0, 0.4)
    seed_everything(seed, verbose=False)
    network = torch.nn.Sequential(torch.nn.Linear(1, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
    module = BayesRegressor(network, lambda p: torch.optim.Adam(p, lr=5e-3), noise_std=NOISE)
    trainer = quiet_trainer([METHODS[method]()], epochs)
    trainer.fit(module, DataLoader(train, batch_size=20, shuffle=True))

    def std(data: TensorDataset) -> Tensor:
        batches = trainer.predict(module, DataLoader(data, batch_size=500))
        return torch.cat([batch["epistemic"] for batch in batches or []]).sqrt().mean()  # type: ignore[call-overload, index]

    def nll(data: TensorDataset) -> float:
        return trainer.test(module, DataLoader(data, batch_size=500), verbose=False)[0]["test/reg/NLL"]

    on_data, in_gap = std(new), std(gap)
    row = {"ratio": float(in_gap / on_data), "std": float(on_data), "nll": nll(new), "nll_gap": nll(gap)}
    return {"method": method, "seed": seed, **row}


def main(argv: list[str] | None = None) -> None:
    """Print a table of means and standard errors over seeds, and write every run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    with quiet():
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        rows = [scores(method, seed, args.epochs) for method in METHODS for seed in seeds]
    print(f"{'callback':32} {'band in the gap / on the data':>30} {'smallest':>9} {'NLL':>16} {'NLL in the gap':>16}")
    for method in METHODS:
        of = {key: [float(row[key]) for row in rows if row["method"] == method] for key in ("ratio", "nll", "nll_gap")}  # type: ignore[arg-type]
        means = {key: mean_and_error(values) for key, values in of.items()}
        print(f"{method:32} {means['ratio']:>30} {min(of['ratio']):9.2f} {means['nll']:>16} {means['nll_gap']:>16}")
    save_json(args.json, {"epochs": args.epochs, "runs": rows})


if __name__ == "__main__":
    main()
