"""Several modes and noise in one run, against the user's optimizer, one temperature, and ensembles.

    python -m benchmarks.defaults.modes --root DATA [--problems cifar-bn fashion-vit] [--methods user modes short]
        [--first-seed 100] [--seeds 3] [--json modes.json] [--table]

`DATA` has torchvision's folders, and SVHN's ``test_32x32.mat``. A seed draws initial weights and batches; the seeds of one
decade share 5,000 training, 1,000 validation and 4,000 test images.

``ensemble`` trains three networks as the user does, ``short`` three with a third of the epochs each. ``modes`` averages over
as many of the last modes as minimise the validation NLL. ``vogn`` and ``ivon`` validate in each epoch; ``flat`` and
``perm`` are controls. Each is scored at its mean, as samples, and by default, which is with what the end of the fit chose.
``vogn+modes`` has one sample around each mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.defaults.controls import FlatNoiseCallback, PermutedCallback
from benchmarks.defaults.mode_problems import PROBLEMS, Images, ModeProblem
from benchmarks.defaults.scores import classification_scores, ood_scores
from benchmarks.defaults.study import Record, run_study, study_parser
from benchmarks.defaults.users import UserModule, fit, outputs_of
from benchmarks.over_seeds import paired_table
from lightning_bayes import IVONCallback, MultiModeCallback, VariationalCallback, VOGNCallback
from lightning_bayes.callbacks.ensembles.mode_choice import best_count, nll_of_last
from lightning_bayes.callbacks.evaluation.finished_samples import finished
from lightning_bayes.predictive import MemberSamples, PosteriorSamples, Samples, fit_temperature, mutual_information

MEMBERS, SAMPLES = 3, 8
NOISY: Final[dict[str, Callable[..., VariationalCallback]]] = {
    "vogn": VOGNCallback,
    "ivon": partial(IVONCallback, lr=1.0),
    "flat": FlatNoiseCallback,
    "perm": PermutedCallback,
}
METHODS: Final = ("user", "ensemble", "modes", "short", *NOISY, "vogn+modes")
COLUMNS: Final = ("error", "nll", "calibration", "mi", "entropy_auroc", "mi_auroc")
TEMPERED: Final = ("error", "nll", "calibration", "entropy_auroc", "mi_auroc")  # recorded at a fitted temperature too
NETWORKS: Final = ("user", "modes", "ensemble", "short")  # methods that the table shows at that temperature


class Logits(NamedTuple):
    """Outputs under each network, ``[S, N, 10]``."""

    validation: Tensor
    test: Tensor
    ood: Tensor

    def at(self, temperature: float) -> Logits:
        """The outputs divided by a temperature."""
        return Logits(*(part / temperature for part in self))


@cache
def images_of(problem: str, root: Path, split: int) -> Images:
    """The images of one split."""
    return PROBLEMS[problem].load(root, split)


def run(root: Path, problem: str, method: str, seed: int) -> Iterator[Record]:
    """Train once, and score what this run gives."""
    images = images_of(problem, root, seed // 10)
    for name, logits in trained(PROBLEMS[problem], images, method, seed):
        yield {"method": name, **scores(logits, images)}


def trained(problem: ModeProblem, images: Images, method: str, seed: int) -> Iterator[tuple[str, Logits]]:
    """The logits of a method, or of the ways to evaluate a posterior."""
    if method in NOISY:
        module, draws = _fit_noisy(problem, images, seed, SAMPLES, NOISY[method](seed=seed, eval_samples=SAMPLES))
        yield f"{method} mean", _logits(module, images)
        yield method, _logits(module, images, draws)
        yield f"{method} default", _by_default(module, images, draws)
    elif method == "vogn+modes":  # one sample around each mode
        module, around = _fit_noisy(problem, images, seed, 1, VOGNCallback(seed=seed), MultiModeCallback())
        yield method, _by_default(module, images, around)
    elif method == "modes":
        modes = MultiModeCallback()
        logits = _logits(_fit(problem, images, seed, problem.epochs, modes), images, MemberSamples(modes.modes))
        count = best_count(nll_of_last(logits.validation, images.val_y, "softmax"))
        yield method, Logits(*(part[-count:] for part in logits))
    else:
        seeds = {"user": [seed], "ensemble": [seed + k for k in range(MEMBERS)]}
        epochs = -(-problem.epochs // MEMBERS) if method == "short" else problem.epochs
        of_each = seeds.get(method, [seed + 1000 * k for k in range(MEMBERS)])
        parts = [_logits(_fit(problem, images, each, epochs), images) for each in of_each]
        yield method, Logits(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _fit_noisy(
    problem: ModeProblem, images: Images, seed: int, count: int, callback: VariationalCallback, *others: Callback
) -> tuple[UserModule, PosteriorSamples]:
    """Fit with validation in each epoch; so many samples of the posterior."""
    module = _fit(problem, images, seed, problem.epochs, callback, *others, validated=True)
    assert callback.optimizer is not None  # after a fit
    return module, PosteriorSamples(callback.optimizer.posterior(), count, seed)


def _by_default(module: UserModule, images: Images, samples: Samples) -> Logits:
    """Outputs with what the end of the fit chose."""
    chosen, temperature = finished(module.trainer, module, samples, "softmax")
    return _logits(module, images, chosen).at(temperature)


def _fit(
    problem: ModeProblem, images: Images, seed: int, epochs: int, *callbacks: Callback, validated: bool = False
) -> UserModule:
    seed_everything(seed, verbose=False)
    module = problem.module(epochs)
    train, validation = TensorDataset(images.train_x, images.train_y), TensorDataset(images.val_x, images.val_y)
    options: dict[str, Any] = {"drop_last": True, "precision": problem.precision}
    fit(module, train, problem.batch, epochs, callbacks, validation if validated else None, **options)
    return module


@torch.no_grad()
def _logits(module: UserModule, images: Images, samples: Samples | None = None) -> Logits:
    def of(x: Tensor) -> Tensor:
        if samples is None:
            return outputs_of(module, x, 500)[None]
        return samples.outputs(module, lambda: outputs_of(module, x, 500))

    return Logits(of(images.val_x), of(images.test_x), of(images.ood_x))


def scores(logits: Logits, images: Images) -> Record:
    """Scores as they are and, with the suffix ``_t``, at one temperature fitted on the validation images."""
    temperature = fit_temperature(logits.validation, images.val_y)
    information = mutual_information(logits.test.double().softmax(-1)).mean()
    found: Record = {"networks": len(logits.test), "temperature": temperature, "mi": float(information)}
    for suffix, factor in (("", 1.0), ("_t", temperature)):
        _, test, ood = logits.at(factor)
        each = {**classification_scores(test, images.test_y), **ood_scores(test, ood)}
        found |= {name + suffix: value for name, value in each.items()}
    return found


def table(records: list[Record]) -> str:
    """Scores, and error and NLL minus those of the user with one temperature."""
    tempered = [
        {**record, "method": f"{record['method']} T", **{name: record[f"{name}_t"] for name in TEMPERED}}
        for record in records
        if record["method"] in NETWORKS
    ]
    return paired_table([*records, *tempered], COLUMNS, "user T", ("error", "nll"))


def main() -> None:
    """Run what is missing, and print the table."""
    parser = study_parser(__doc__, first_seed=100, seeds=3, problems=PROBLEMS, methods=METHODS)
    parser.set_defaults(methods=["user", "modes", "short"])
    print(table(run_study(parser.parse_args(), ("problems", "methods"), run, "runs")))


if __name__ == "__main__":
    main()
