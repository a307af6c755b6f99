"""Several modes in one run, against the user's optimizer, one temperature, and ensembles of three and of equal cost.

    python -m benchmarks.defaults.modes --root DATA [--problems cifar-bn fashion-vit] [--methods user modes short]
        [--seeds 100 101 102] [--json modes.json] [--table]

`DATA` has torchvision's folders, and SVHN's ``test_32x32.mat``. A seed draws initial weights and batches; the seeds of one
decade share 5,000 training, 1,000 validation and 4,000 test images, and their first three users are the ensemble.

``modes@PEAK/COUNT/FIRST`` sets the arguments of `MultiModeCallback`. It averages over as many of the last modes as minimise
the validation NLL; ``all`` averages over all of them, ``last`` is the last one alone. ``vogn+modes`` has one sample around
each, with the temperature that the fit chose. ``short`` is an ensemble of three networks with a third of the epochs each.
Runs that are in the JSON file are skipped.

``vogn`` validates in each epoch, ``novalid`` does not, ``flat`` and ``perm`` are its controls. ``ivon`` chooses its own
start, ``ivon_paper`` has the published settings. Each is scored at its mean, as samples, and by default, which is with what
the end of the fit chose; the first two also with statistics of each sample from 512 training images and with `calibrate`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.defaults.controls import FlatNoiseCallback, PermutedCallback
from benchmarks.defaults.mode_problems import PROBLEMS, TRAIN, Images, ModeProblem, UserModule
from benchmarks.defaults.mode_table import table
from benchmarks.defaults.scores import classification_scores, ood_scores
from benchmarks.provenance import save_json, saved_rows
from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes import IVONCallback, MultiModeCallback, VariationalCallback, VOGNCallback, calibrate
from lightning_bayes.callbacks.ensembles.mode_choice import best_count, nll_of_last
from lightning_bayes.callbacks.evaluation.finished_samples import finished
from lightning_bayes.predictive import (
    MemberSamples,
    PosteriorSamples,
    Samples,
    fit_temperature,
    mutual_information,
    recalibrate,
)
from lightning_bayes.predictive.recalibration import running_statistics

MEMBERS, SAMPLES = 3, 8
# The published hess_init and weight decay, for this many images.
_PUBLISHED: dict[str, Any] = {"num_data": TRAIN, "init_precision": TRAIN * 0.5002, "prior_precision": TRAIN * 2e-4}
NOISY: dict[str, Callable[..., VariationalCallback]] = {
    "vogn": VOGNCallback,
    "novalid": VOGNCallback,
    "flat": FlatNoiseCallback,
    "perm": PermutedCallback,
    "ivon": partial(IVONCallback, lr=1.0),
    "ivon_paper": partial(IVONCallback.from_preset, "shen2024-cifar10-resnet20", **_PUBLISHED),
}
Record = dict[str, Any]


class Logits(NamedTuple):
    """Outputs under each network, ``[S, N, 10]``."""

    validation: Tensor
    test: Tensor
    ood: Tensor

    def at(self, temperature: float) -> Logits:
        """The outputs divided by a temperature."""
        return Logits(*(part / temperature for part in self))


def run(problem: ModeProblem, images: Images, method: str, seed: int) -> Iterator[tuple[str, Logits, float]]:
    """Train once and yield the methods that this run gives, with their logits and the seconds of the fit."""
    if method == "short":
        parts = [_fit(problem, images, seed + 1000 * k, epochs=-(-problem.epochs // MEMBERS)) for k in range(MEMBERS)]
        yield method, joined([_logits(module, images) for module, _ in parts]), sum(s for _, s in parts)
        return
    if method == "vogn+modes":
        yield _noisy_modes(problem, images, seed)
        return
    if method in NOISY:
        yield from _noisy(problem, images, method, seed)
        return
    callback = None if method == "user" else MultiModeCallback(*_settings(method))
    module, seconds = _fit(problem, images, seed, problem.epochs, *([] if callback is None else [callback]))
    if callback is None:
        yield method, _logits(module, images), seconds
        return
    logits = _logits(module, images, MemberSamples(callback.modes))
    count = best_count(nll_of_last(logits.validation, images.val_y, "softmax"))
    yield method, Logits(*(part[-count:] for part in logits)), seconds
    yield method.replace("modes", "all"), logits, seconds
    yield method.replace("modes", "last"), Logits(*(part[-1:] for part in logits)), seconds


def _noisy(problem: ModeProblem, images: Images, method: str, seed: int) -> Iterator[tuple[str, Logits, float]]:
    """The ways to evaluate one posterior."""
    callback = NOISY[method](seed=seed, eval_samples=SAMPLES)
    module, seconds = _fit(problem, images, seed, problem.epochs, callback, validated=method != "novalid")
    assert callback.optimizer is not None  # after a fit
    posterior, inputs = callback.optimizer.posterior(), images.train_x[:512]
    draws, stats = PosteriorSamples(posterior, SAMPLES, seed), [inputs] if running_statistics(module) else []

    @cache
    def at(scale: float) -> Logits:
        samples: Samples = draws.scaled(scale)
        return _logits(module, images, recalibrate(module, samples, [partial(module, inputs)]) if stats else samples)

    yield f"{method} mean", _logits(module, images), seconds
    plain = _logits(module, images, draws) if stats else at(1.0)
    yield method, plain, seconds
    yield f"{method} default", _by_default(module, images, draws), seconds
    if method not in {"vogn", "novalid"}:
        return
    if stats:
        yield f"{method} bn", at(1.0), seconds
    chosen = calibrate(module, posterior, [(images.val_x, images.val_y)], SAMPLES, seed=seed, recalibrate_on=stats)
    scale, temperature = chosen.calibration.scale, chosen.calibration.temperature
    yield f"{method} calibrated", at(scale).at(temperature), seconds


def _noisy_modes(problem: ModeProblem, images: Images, seed: int) -> tuple[str, Logits, float]:
    """One sample around each mode, with what the end of the fit chose."""
    callback = VOGNCallback(seed=seed)
    module, seconds = _fit(problem, images, seed, problem.epochs, callback, MultiModeCallback(), validated=True)
    assert callback.optimizer is not None  # after a fit
    around = PosteriorSamples(callback.optimizer.posterior(), 1, seed)
    return "vogn+modes", _by_default(module, images, around), seconds


def _by_default(module: UserModule, images: Images, samples: Samples) -> Logits:
    """Outputs with what the end of the fit chose."""
    chosen, temperature = finished(module.trainer, module, samples, "softmax")
    return _logits(module, images, chosen).at(temperature)


def _settings(method: str) -> tuple[Any, ...]:
    """The number of modes, the peak and the fraction of the first cycle of ``modes@PEAK/COUNT/FIRST``."""
    if "@" not in method:
        return ()
    peak, count, first = method.partition("@")[2].split("/")
    return int(count), float(peak), float(first)


def _fit(
    problem: ModeProblem, images: Images, seed: int, epochs: int, *callbacks: Callback, validated: bool = False
) -> tuple[UserModule, float]:
    seed_everything(seed, verbose=False)
    module = UserModule(problem, epochs, len(images.train_y))
    loader = DataLoader(TensorDataset(images.train_x, images.train_y), problem.batch, shuffle=True, drop_last=True)
    start = time.process_time()
    with quiet():
        validation = DataLoader(TensorDataset(images.val_x, images.val_y), 500) if validated else None
        quiet_trainer(callbacks, epochs, precision=problem.precision).fit(module, loader, validation)
    return module.eval(), time.process_time() - start


@torch.no_grad()
def _logits(module: UserModule, images: Images, samples: Samples | None = None) -> Logits:
    def of(x: Tensor) -> Tensor:
        def forward() -> Tensor:
            return torch.cat([module(part) for part in x.split(500)])

        return forward()[None] if samples is None else samples.outputs(module, forward)

    return Logits(of(images.val_x), of(images.test_x), of(images.ood_x))


def joined(parts: list[Logits]) -> Logits:
    """The networks of several runs as one ensemble."""
    return Logits(*(torch.cat(part) for part in zip(*parts, strict=True)))


def scores(logits: Logits, images: Images) -> Record:
    """Scores as they are and, with the suffix ``_t``, at one temperature fitted on the validation images."""
    temperature = fit_temperature(logits.validation, images.val_y)
    found: Record = {"networks": len(logits.test), "temperature": temperature, "mi": float(_information(logits.test))}
    for suffix, factor in (("", 1.0), ("_t", temperature)):
        _, test, ood = logits.at(factor)
        each = {**classification_scores(test, images.test_y), **ood_scores(test, ood)}
        found |= {name + suffix: value for name, value in each.items()}
    return found


def _information(outputs: Tensor) -> Tensor:
    return mutual_information(outputs.double().softmax(-1)).mean()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", default=["user", "modes", "short"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Run what is missing, save every record at once, and print the table."""
    options = _options()
    records: list[Record] = saved_rows(options.json, "runs")
    done = {(r["problem"], r["method"], r["seed"]) for r in records}
    users: dict[tuple[str, int], list[Logits]] = {}

    def add(problem: str, method: str, seed: int, logits: Logits, seconds: float, images: Images) -> None:
        key: Record = {"problem": problem, "method": method, "seed": seed, "seconds": round(seconds, 1)}
        records.append({**key, **scores(logits, images)})
        shown = {n: round(v, 4) for n, v in records[-1].items() if isinstance(v, float)}
        print(problem, method, seed, shown, flush=True)
        save_json(options.json, {"runs": records})

    for seed in [] if options.table else options.seeds:
        for name in options.problems:
            problem, images = PROBLEMS[name], PROBLEMS[name].load(options.root, seed // 10)
            for method in options.methods:
                if (name, method, seed) in done:
                    continue
                for found, logits, seconds in run(problem, images, method, seed):
                    add(name, found, seed, logits, seconds, images)
                    if found == "user":
                        members = users.setdefault((name, seed // 10), [])
                        members.append(logits)
                        if len(members) == MEMBERS:
                            add(name, "ensemble", seed // 10 * 10, joined(members), MEMBERS * seconds, images)
    print(table(records))


if __name__ == "__main__":
    main()
