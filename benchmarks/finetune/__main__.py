"""LeNet-5 trained on MNIST digits, adapted to clothing and to letters with 1000 labelled images.

    python -m benchmarks.finetune --root DATA [--seeds 3] [--json benchmarks/results/finetune.json] [--table]

Runs that are already in the JSON file are skipped; a file with other settings is refused. `--table` only prints the file.
`--validate` evaluates on further images of the training pool instead of the test images, to choose settings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

import lightning_bayes
from benchmarks.finetune.data import SHOTS, TARGETS, Images, digits, target, unfamiliar
from benchmarks.over_seeds import mean_and_error
from benchmarks.provenance import save_json
from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes import NoisyKFACCallback, VariationalCallback, VOGNCallback, mc_predict
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.metrics import expected_calibration_error, nll_per_example, ood_auroc
from lightning_bayes.optim.steps.base_optimizer import PRIOR_PRECISION
from lightning_bayes.predictive import entropy
from lightning_bayes.zoo import BayesClassifier, create_model

Weights = dict[str, Tensor]


def pretrain(images: Images, seed: int, epochs: int) -> Weights:
    """Train on digits with Adam, and return the weights."""
    seed_everything(seed, verbose=False)
    task = _task(None)
    _fit(task, images, batch_size=64, epochs=epochs)
    return task.model.state_dict()


def finetune(weights: Weights, images: Images, seed: int, epochs: int, callback: Callback | None) -> BayesClassifier:
    """Adapt pretrained weights to new classes, with a new head and Adam's default learning rate."""
    seed_everything(seed, verbose=False)
    task = _task(weights)
    _fit(task, images, batch_size=32, epochs=epochs, callback=callback)
    return task.eval()


def _task(weights: Weights | None) -> BayesClassifier:
    replaces = weights is not None
    model = create_model("lenet5", 10, in_channels=1, pretrained=weights, replace_head=replaces, image_size=28)
    return BayesClassifier(model, num_classes=10, optimizer=lambda parameters: Adam(parameters, lr=1e-3))


def _fit(task: BayesClassifier, images: Images, batch_size: int, epochs: int, callback: Callback | None = None) -> None:
    loader: DataLoader[Any] = DataLoader(TensorDataset(*images), batch_size=batch_size, shuffle=True)
    with quiet():
        quiet_trainer([callback], epochs).fit(task, loader)


EVAL_SAMPLES: Final = 32
PEER: Final = "laplace"
Predict = Callable[[Tensor], Tensor]  # normalised images to probabilities, [N, 10]
Method = Callable[[Weights, Images, int, int], Predict]  # weights, images, seed, epochs

HEAD: Final = r"^model\.fc3\."  # the last layer of LeNet-5 in a task


def adam(weights: Weights, images: Images, seed: int, epochs: int) -> Predict:
    """Adam, the point estimate."""
    task = finetune(weights, images, seed, epochs, None)
    return _in_parts(lambda x: task(x).softmax(-1))


def variational(
    callback: type[VariationalCallback],
    weights: Weights,
    images: Images,
    seed: int,
    epochs: int,
    **arguments: Any,
) -> Predict:
    """The same Adam with a callback of this package."""
    variational_callback = callback(seed=seed, **arguments)
    task = finetune(weights, images, seed, epochs, variational_callback)
    assert variational_callback.optimizer is not None
    posterior = variational_callback.optimizer.posterior()
    return _in_parts(lambda x: mc_predict(task, posterior, x, EVAL_SAMPLES).probs)


def laplace(weights: Weights, images: Images, seed: int, epochs: int) -> Predict:
    """Adam, then laplace-torch's last-layer Laplace with its defaults: Kronecker factors, probit, prior by evidence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from laplace import Laplace

        task = finetune(weights, images, seed, epochs, None)
        posterior = Laplace(task.model, "classification", subset_of_weights="last_layer", hessian_structure="kron")
        posterior.fit(DataLoader(TensorDataset(*images), batch_size=100))
        posterior.optimize_prior_precision(method="marglik")
    return _in_parts(posterior)


def posthoc(weights: Weights, images: Images, seed: int, epochs: int, **arguments: Any) -> Predict:
    """Adam, then Laplace of this package with its defaults: Kronecker factors, probit, prior by evidence."""
    task = finetune(weights, images, seed, epochs, None)
    loader = DataLoader(TensorDataset(*images), batch_size=100)
    approximation = lightning_bayes.laplace(task, loader, require_trained=False, **arguments)
    return _in_parts(lambda x: mc_predict(task, approximation.posterior, x, linearized="closed_form").probs)


# An explicit prior also acts on the mean; the default one only on the width of the posterior.
_vogn: Final = partial(variational, VOGNCallback, prior_precision=PRIOR_PRECISION)

METHODS: Final[dict[str, tuple[str, Method]]] = {
    "adam": ("Adam", adam),
    "vogn_zero": ("VOGN, prior at zero", partial(_vogn, prior_mean="zero")),
    "vogn_initial": ("VOGN, prior at the pretrained weights", partial(_vogn, prior_mean="initial")),
    "vogn_head": ("VOGN, last layer only", partial(_vogn, bayesian=HEAD)),
    "noisy_kfac": (
        "Noisy K-FAC, prior at the pretrained weights",
        partial(variational, NoisyKFACCallback, prior_mean="initial"),
    ),
    "laplace_head": ("Laplace, last layer", posthoc),
    "laplace_head_full": ("Laplace, last layer, full", partial(posthoc, structure="full")),
    "laplace_all": ("Laplace, all layers", partial(posthoc, subset="all")),
    PEER: ("laplace-torch, last layer", laplace),
}


def _in_parts(predict: Predict) -> Predict:
    @torch.no_grad()
    def whole(x: Tensor) -> Tensor:
        return torch.cat([predict(part) for part in x.split(1000)])

    return whole


def scores(predict: Predict, test: Images, others: Mapping[str, Tensor]) -> dict[str, float]:
    """Score a prediction function."""
    probs = _probs(predict, test.x)
    values = {
        "accuracy": (probs.argmax(-1) == test.y).double().mean(),
        "nll": nll_per_example(probs, test.y).mean(),
        "ece": expected_calibration_error(probs, test.y),
    }
    test_entropy = entropy(probs)
    for name, images in others.items():
        ood_entropy = entropy(_probs(predict, images))
        is_ood = torch.cat([torch.zeros_like(test_entropy), torch.ones_like(ood_entropy)])
        values[name] = ood_auroc(torch.cat([test_entropy, ood_entropy]), is_ood)
    return {name: float(value) for name, value in values.items()}


def _probs(predict: Predict, images: Tensor) -> Tensor:
    probs = predict(images).double()
    return probs / probs.sum(-1, keepdim=True)


# Score → column of the table. The arrow points in the better direction.
COLUMNS = {
    "accuracy": "accuracy ↑",
    "nll": "NLL ↓",
    "ece": "ECE ↓",
    "ood_auroc": "OOD AUROC ↑",
    "digits_auroc": "of digits ↑",
}
Record = dict[str, Any]


def run(method: str, name: str, seed: int, weights: Weights, options: argparse.Namespace) -> Record:
    """Adapt and score once."""
    images = target(name, options.root, seed, options.validate, options.shots)
    start = time.process_time()
    predict = METHODS[method][1](weights, images.train, seed, options.epochs)
    seconds = round(time.process_time() - start, 1)
    test_scores = scores(predict, images.test, unfamiliar(name, options.root))
    return {"target": name, "method": method, "seed": seed, **test_scores, "cpu_seconds": seconds}


def missing(options: argparse.Namespace, records: list[Record], seed: int) -> list[tuple[str, str]]:
    """The requested methods and targets without a record."""
    done = {(record["method"], record["target"]) for record in records if record["seed"] == seed}
    return [(m, t) for t in options.targets for m in options.methods if (m, t) not in done]


def table(records: list[Record]) -> str:
    """Format a Markdown table: one line per target and method, means ± standard errors over seeds."""
    lines = [
        f"| target | method | {' | '.join(COLUMNS.values())} | CPU s | seeds |",
        "|---" * (len(COLUMNS) + 4) + "|",
    ]
    for name in TARGETS:
        for method, (title, _) in METHODS.items():
            rows = [r for r in records if (r["target"], r["method"]) == (name, method)]
            if rows:
                cells = [mean_and_error([row[score] for row in rows]) for score in COLUMNS]
                seconds = statistics.mean(row["cpu_seconds"] for row in rows)
                lines.append(f"| {name} | {title} | {' | '.join(cells)} | {seconds:.0f} | {len(rows)} |")
    return "\n".join(lines)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--pretrain-epochs", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--shots", type=int, default=SHOTS, help="labelled images per class")
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true")
    return parser.parse_args(arguments)


def _without_absent_peer(methods: list[str]) -> list[str]:
    if PEER in methods and find_spec("laplace") is None:
        print("laplace-torch is not installed and is left out; pip install -e '.[bench]' installs it.")
        return [method for method in methods if method != PEER]
    return methods


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, seed by seed, save it, and print the table."""
    options = _options(arguments)
    options.methods = _without_absent_peer(options.methods)
    saved = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    records: list[Record] = saved.get("runs", [])
    if not options.table:
        _refuse_other_settings(options, saved)
    for seed in range(0 if options.table else options.seeds):
        _one_seed(options.first_seed + seed, options, records)
    print(table(records))


def _one_seed(seed: int, options: argparse.Namespace, records: list[Record]) -> None:
    pending = missing(options, records, seed)
    weights = pretrain(digits(options.root), seed, options.pretrain_epochs) if pending else {}
    for method, name in pending:
        record = run(method, name, seed, weights, options)
        records.append(record)
        values = ", ".join(f"{score} {record[score]:.4f}" for score in COLUMNS)
        print(f"{name} {method} seed {seed}: {values} ({record['cpu_seconds']} s)", flush=True)
        save_json(options.json, {**_settings(options), "runs": records})


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("pretrain_epochs", "epochs", "shots", "validate")}


def _refuse_other_settings(options: argparse.Namespace, saved: dict[str, Any]) -> None:
    different = [
        f"{name}={saved[name]} (requested: {value})"
        for name, value in _settings(options).items()
        if saved.get(name, value) != value
    ]
    if different:
        raise HyperparameterError(f"{options.json} has runs with {', '.join(different)}. Choose another file.")


if __name__ == "__main__":
    main()
