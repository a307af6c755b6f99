"""The prior of a Laplace approximation chosen by marginal likelihood or by validation NLL, compared with a temperature.

    python -m benchmarks.laplace.prior --root DATA [--problems digits fashion-lenet] [--seeds 5] [--first-seed 10]
        [--json FILE]

A network of `benchmarks.defaults` is trained with Adam on four fifths of its training set; the other fifth is the validation
set. *mean* is that network. *temperature* is the control: the same network with the temperature of the lowest validation
NLL, which uses the validation set but no posterior. The other methods are Kronecker-factored Laplace approximations with the
probit predictive. JSON is written after each run; finished runs are skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, random_split

from benchmarks.defaults.problems import PROBLEMS
from benchmarks.defaults.scores import classification_scores, ood_scores
from benchmarks.defaults.training import UserModule, fit
from benchmarks.over_seeds import mean_and_error
from benchmarks.provenance import save_json, saved_rows
from lightning_bayes import laplace, mc_predict
from lightning_bayes.predictive import fit_temperature

VALIDATION: Final = 0.2  # fraction of the training set
COLUMNS: Final = {"error": "error ↓", "nll": "NLL ↓", "calibration": "ECE ↓", "entropy_auroc": "OOD AUROC ↑"}
Row = dict[str, Any]
Logits = Callable[[Tensor], Tensor]  # log-probabilities of the predictive, [N, C]


def trained(problem: str, seed: int, root: Path) -> tuple[UserModule, TensorDataset, TensorDataset, Any]:
    """The trained network, its training set, the validation set, and all data."""
    specification, data = PROBLEMS[problem], PROBLEMS[problem].load(root, seed)
    rows = TensorDataset(data.train_x, data.train_y)
    parts = random_split(rows, [1 - VALIDATION, VALIDATION], torch.Generator().manual_seed(seed))
    train, validation = (TensorDataset(*rows[part.indices]) for part in parts)
    seed_everything(seed, verbose=False)
    module = UserModule(specification, data, "adam")
    fit(module, train, [])
    return module, train, validation, data


def predictives(module: UserModule, train: TensorDataset, validation: TensorDataset) -> dict[str, Logits]:
    """The predictive of each method."""
    with torch.no_grad():
        held_out = module(validation.tensors[0])
    temperature = fit_temperature(held_out[None], validation.tensors[1])
    methods: dict[str, Logits] = {"mean": lambda x: module(x), "temperature": lambda x: module(x) / temperature}
    for subset in ("last_layer", "all"):
        for prior in ("marglik", "validation"):
            posterior = laplace(
                module,
                DataLoader(train, 100),
                subset=subset,
                prior_precision=prior,
                validation=DataLoader(validation, 100) if prior == "validation" else None,
            ).posterior
            methods[f"{subset}, {prior}"] = partial(_probit, module, posterior)
    return methods


def _probit(module: UserModule, posterior: Any, x: Tensor) -> Tensor:
    parts = [mc_predict(module, posterior, part, linearized="closed_form").probs for part in x.split(500)]
    return torch.cat(parts).clamp_min(1e-38).log()


def measure(problem: str, seed: int, root: Path) -> list[Row]:
    """Train once and score every method."""
    module, train, validation, data = trained(problem, seed, root)
    rows = []
    for method, logits in predictives(module, train, validation).items():
        with torch.no_grad():
            test, ood = logits(data.test_x)[None], logits(data.ood_x)[None]
        scores = {**classification_scores(test, data.test_y), **ood_scores(test, ood)}
        rows.append({"problem": problem, "seed": seed, "method": method, **scores})
    return rows


def table(rows: list[Row]) -> str:
    """Format a Markdown table: means, and paired NLL differences from the temperature, ± standard errors over seeds."""
    lines = [
        f"| problem | method | {' | '.join(COLUMNS.values())} | NLL minus temperature's | seeds |",
        "|---" * 8 + "|",
    ]
    for problem, method in dict.fromkeys((row["problem"], row["method"]) for row in rows):
        runs = [row for row in rows if (row["problem"], row["method"]) == (problem, method)]
        control = {r["seed"]: r["nll"] for r in rows if (r["problem"], r["method"]) == (problem, "temperature")}
        pairs = [row["nll"] - control[row["seed"]] for row in runs]
        cells = [mean_and_error([row[score] for row in runs]) for score in COLUMNS]
        lines.append(f"| {problem} | {method} | {' | '.join(cells)} | {mean_and_error(pairs, '+')} | {len(runs)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--problems", nargs="+", default=["digits", "fashion-lenet"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows: list[Row] = saved_rows(options.json, "runs")
    done = {(row["problem"], row["seed"]) for row in rows}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for problem in options.problems:
            if (problem, seed) in done:
                continue
            rows += measure(problem, seed, options.root)
            print(f"{problem}, seed {seed}", {row["method"]: round(row["nll"], 4) for row in rows[-6:]}, flush=True)
            save_json(options.json, {"runs": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
