"""Whether calibration ever raises the test NLL of a classifier: each fit before and after, and the user's optimizer with T.

    python -m benchmarks.defaults.calibrated --root DATA [--problems digits cifar-resnet] [--callback IVONCallback]
        [--first-seed 200] [--seeds 5] [--held-out .1] [--json calibrated.json] [--user] [--table]

A fraction of the training set is held out for validation. The cifar problems train on `--images` images. *temperature* is
``calibrate=None``; *width* is `lightning_bayes.calibrate`, as ``calibrate=True`` without a
bound of time. Differences to the fit before are paired over seeds.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_bayes
from benchmarks.defaults.problems import PROBLEMS
from benchmarks.defaults.scores import classification_scores, ood_scores
from benchmarks.defaults.training import UserModule
from benchmarks.over_seeds import with_error
from benchmarks.provenance import save_json, saved_rows
from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes import calibrate
from lightning_bayes.callbacks.calibration_base import CalibrationCallback
from lightning_bayes.predictive import PosteriorSamples, fit_temperature

SAMPLES = 10
METHODS = ("before", "temperature", "width")
CLASSIFIERS = [name for name, problem in PROBLEMS.items() if not problem.is_regression]


class Module(UserModule):
    """A user's module with a validation step."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Call the network."""
        self(batch[0])


def run(name: str, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The scores of one fit before and after calibration, and of the user's optimizer with T."""
    problem, optimizer = PROBLEMS[name], "adamw-onecycle" if name == "cifar-resnet" else "adamw-cosine"
    data = problem.load(options.root, seed)
    order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(seed))
    order = order[: options.images] if name.startswith("cifar") else order
    count = int(options.held_out * len(order))
    held_out, train = order[:count], order[count:]
    validation = TensorDataset(data.train_x[held_out], data.train_y[held_out])
    data = data._replace(train_x=data.train_x[train], train_y=data.train_y[train])
    records = []
    for method in ("bayes", "user") if options.user else ("bayes",):
        seed_everything(seed, verbose=False)
        module = Module(problem, data, optimizer)
        callback = getattr(lightning_bayes, options.callback)(seed=seed, eval_samples=SAMPLES, calibrate=None)
        start = time.perf_counter()
        with quiet():
            callbacks = [callback] if method == "bayes" else []
            trainer = quiet_trainer(
                callbacks, problem.epochs, check_val_every_n_epoch=problem.epochs, num_sanity_val_steps=1
            )
            train_set = TensorDataset(data.train_x, data.train_y)
            trainer.fit(
                module, DataLoader(train_set, problem.batch, shuffle=True), DataLoader(validation, problem.batch)
            )
        seconds = time.perf_counter() - start
        module.eval()
        key = {
            "problem": name,
            "callback": options.callback,
            "seed": seed,
            "held_out": count,
            "seconds": round(seconds, 1),
        }
        if method == "user":
            temperature = fit_temperature(_outputs(module, validation.tensors[0]), validation.tensors[1])
            scores = classification_scores(_outputs(module, data.test_x) / temperature, data.test_y)
            records.append({**key, "method": "user with T", "temperature": temperature, **scores})
            continue
        chosen = next(each for each in trainer.callbacks if isinstance(each, CalibrationCallback))  # type: ignore[attr-defined]
        posterior = callback.optimizer.posterior()
        both = calibrate(module, posterior, [validation.tensors], SAMPLES, seed=seed).posterior
        pairs = ((1.0, 1.0), (1.0, chosen.temperature), (both.scale, both.temperature))
        for label, (scale, temperature) in zip(METHODS, pairs, strict=True):
            at = partial(_outputs, module, samples=PosteriorSamples(posterior, SAMPLES, seed).scaled(scale))
            test = at(data.test_x) / temperature
            scores = classification_scores(test, data.test_y)
            if data.ood_x is not None:
                scores |= ood_scores(test, at(data.ood_x) / temperature)
            share = chosen.seconds / seconds
            records.append(
                {**key, "method": label, "scale": scale, "temperature": temperature, "share": share, **scores}
            )
    return records


@torch.no_grad()
def _outputs(module: Module, x: Tensor, samples: PosteriorSamples | None = None) -> Tensor:
    def forward() -> Tensor:
        return torch.cat([module(part) for part in x.split(1000)])  # type: ignore[no-untyped-call]

    return forward()[None] if samples is None else samples.outputs(module, forward)


def table(records: list[dict[str, Any]]) -> str:
    """Paired differences to the fit before, with the choices of each seed."""
    columns = ("problem", "seeds", "user, T", "NLL before", "temperature", "width", "ECE: temperature", "width")
    lines = [
        f"| {' | '.join((*columns, 'AUROC by MI: before', 'temperature', 'width', 'T', 'c', 'share'))} |",
        "|" + " --- |" * 14,
    ]
    for problem, callback in dict.fromkeys((r["problem"], r["callback"]) for r in records):
        by = {(r["method"], r["seed"]): r for r in records if (r["problem"], r["callback"]) == (problem, callback)}
        seeds = sorted({seed for method, seed in by if method == "before"})

        def mean(method: str, score: str, by: Any = by, seeds: Any = seeds) -> str:
            values = [by[method, s][score] for s in seeds if score in by.get((method, s), {})]
            return f"{sum(values) / len(values):.3f}" if values else "–"

        def change(method: str, score: str, by: Any = by, seeds: Any = seeds) -> str:
            values = torch.tensor([by[method, s][score] - by["before", s][score] for s in seeds])
            return with_error(float(values.mean()), float(values.std()) / len(values) ** 0.5, sign="+")

        name = problem if callback == "VOGNCallback" else f"{problem}, {callback}"
        cells = [name, str(len(seeds)), mean("user with T", "nll"), mean("before", "nll")]
        cells += [change(method, score) for score in ("nll", "calibration") for method in METHODS[1:]]
        cells += [mean(method, "mi_auroc") for method in METHODS]
        cells += [", ".join(f"{by['temperature', s]['temperature']:.2f}" for s in seeds)]
        cells += [", ".join(f"{by['width', s]['scale']:.2g}" for s in seeds)]
        cells += [f"{100 * max(by['temperature', s]['share'] for s in seeds):.1f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the missing combinations, save them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--problems", nargs="+", choices=CLASSIFIERS, default=["digits"])
    parser.add_argument("--callback", default="VOGNCallback")
    parser.add_argument("--first-seed", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--held-out", type=float, default=0.1)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--user", action="store_true", help="also train with the user's optimizer alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    records: list[dict[str, Any]] = saved_rows(options.json, "runs")
    done = {(r["problem"], r["callback"], r["seed"]) for r in records}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name in [] if options.table else options.problems:
            if (name, options.callback, seed) not in done:
                records += (found := run(name, seed, options))
                print(*found, sep="\n", flush=True)
                save_json(options.json, {"runs": records})
    print(table(records))


if __name__ == "__main__":
    main()
