"""Whether `calibrate=True` ever raises the test NLL: the same fit before and after, and the user's optimizer with T.

    python -m benchmarks.defaults.calibrated --root DATA [--problems digits cifar-resnet] [--first-seed 200] [--seeds 5]
        [--json calibrated.json] [--user] [--table]

A tenth of the training set is held out for validation. The cifar problems train on `--images` images. Regressions train on
the squared error, with one noise level fitted to the validation set. ``after - before`` is paired over seeds.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.defaults.problems import PROBLEMS, Data, Problem
from benchmarks.defaults.scores import classification_scores
from benchmarks.defaults.training import UserModule
from benchmarks.over_seeds import with_error
from benchmarks.provenance import save_json, saved_rows
from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes import Calibration, VOGNCallback
from lightning_bayes.predictive import PosteriorSamples, fit_temperature, predictive_nll
from lightning_bayes.predictive.densities import fit_noise_std

SAMPLES = 10


class Module(UserModule):
    """A user's module with a validation step; regressions train on the squared error."""

    def __init__(self, problem: Problem, data: Data, optimizer: str) -> None:
        super().__init__(problem, data, optimizer)
        self.net = self.net[0] if problem.is_regression else self.net  # type: ignore[index]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy or squared error."""
        x, y = batch
        return F.mse_loss(self(x)[:, 0], y) if self.problem.is_regression else F.cross_entropy(self(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Call the network."""
        self(batch[0])


def run(name: str, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The scores of one fit with VOGN, before and after calibration, and of the user's optimizer with T."""
    problem, optimizer = PROBLEMS[name], "adamw-onecycle" if name == "cifar-resnet" else "adamw-cosine"
    data = problem.load(options.root, seed % 20 if problem.is_regression else seed)
    order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(seed))
    order = order[: options.images] if name.startswith("cifar") else order
    held_out, train = order[: len(order) // 10], order[len(order) // 10 :]
    validation = TensorDataset(data.train_x[held_out], data.train_y[held_out])
    data = data._replace(train_x=data.train_x[train], train_y=data.train_y[train], ood_x=None)
    records = []
    for method in ("vogn", "user") if options.user and not problem.is_regression else ("vogn",):
        seed_everything(seed, verbose=False)
        module, calibration = Module(problem, data, optimizer), Calibration()
        vogn = VOGNCallback(seed=seed, eval_samples=SAMPLES)
        start = time.perf_counter()
        with quiet():
            callbacks = [vogn, calibration] if method == "vogn" else []
            trainer = quiet_trainer(
                callbacks, problem.epochs, check_val_every_n_epoch=problem.epochs, num_sanity_val_steps=1
            )
            train_set = TensorDataset(data.train_x, data.train_y)
            trainer.fit(
                module,
                DataLoader(train_set, problem.batch, shuffle=True),
                DataLoader(validation, problem.batch),
            )
        seconds = time.perf_counter() - start
        module.eval()
        key = {"problem": name, "seed": seed, "seconds": round(seconds, 1)}
        if method == "user":
            temperature = fit_temperature(_outputs(module, validation.tensors[0]), validation.tensors[1])
            scores = classification_scores(_outputs(module, data.test_x) / temperature, data.test_y)
            records.append({**key, "method": "user with T", "temperature": temperature, **scores})
            continue
        assert vogn.optimizer is not None
        assert calibration.scale is not None
        samples = PosteriorSamples(vogn.optimizer.posterior(), SAMPLES, seed)
        for label, scale, temperature in (
            ("before", 1.0, 1.0),
            ("after", calibration.scale, calibration.temperature),
        ):
            at = partial(_outputs, module, samples=samples.scaled(scale))
            test = at(data.test_x) / temperature
            scores = _scores(problem, test, data.test_y, at, validation)
            chosen = {"scale": scale, "temperature": temperature, "share": calibration.seconds / seconds}
            records.append({**key, "method": label, **chosen, **scores})
    return records


def _scores(problem: Problem, test: Tensor, targets: Tensor, at: Any, validation: TensorDataset) -> dict[str, float]:
    if not problem.is_regression:
        return classification_scores(test, targets)
    x, y = validation.tensors
    std = fit_noise_std(at(x), y[:, None])
    error = float((test.mean(0)[:, 0] - targets).square().mean().sqrt())
    return {"error": error, "nll": predictive_nll(test, targets, "identity", std)}


@torch.no_grad()
def _outputs(module: Module, x: Tensor, samples: PosteriorSamples | None = None) -> Tensor:
    def forward() -> Tensor:
        return torch.cat([module(part) for part in x.split(1000)])

    return forward()[None] if samples is None else samples.outputs(module, forward)


def table(records: list[dict[str, Any]]) -> str:
    """Paired differences of the NLL after and before, with the choices of each seed."""
    lines = ["| problem | seeds | NLL before | after | after - before | user with T | width; temperature | share |"]
    lines.append("|" + " --- |" * 8)
    for name in dict.fromkeys(r["problem"] for r in records):
        by = {(r["method"], r["seed"]): r for r in records if r["problem"] == name}
        seeds = sorted({seed for method, seed in by if method == "after"})
        nll = {m: torch.tensor([by[m, s]["nll"] for s in seeds]) for m in ("before", "after")}
        difference = nll["after"] - nll["before"]
        of_user = torch.tensor([by["user with T", s]["nll"] for s in seeds if ("user with T", s) in by])
        chosen = ", ".join(f"{by['after', s]['scale']:.3g}; {by['after', s]['temperature']:.2f}" for s in seeds)
        share = max(by["after", s]["share"] for s in seeds)
        cells = [name, str(len(seeds)), f"{nll['before'].mean():.4f}", f"{nll['after'].mean():.4f}"]
        error = float(difference.std()) / len(seeds) ** 0.5
        cells += [with_error(float(difference.mean()), error, sign="+")]
        cells += [f"{of_user.mean():.4f} ({len(of_user)})" if len(of_user) else "–", chosen, f"{100 * share:.1f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the missing combinations, save them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=["digits"])
    parser.add_argument("--first-seed", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--user", action="store_true", help="also train with the user's optimizer alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    records: list[dict[str, Any]] = saved_rows(options.json, "runs")
    done = {(r["problem"], r["seed"]) for r in records}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name in [] if options.table else options.problems:
            if (name, seed) not in done:
                records += run(name, seed, options)
                print(*records[-3:], sep="\n", flush=True)
                save_json(options.json, {"runs": records})
    print(table(records))


if __name__ == "__main__":
    main()
