"""The prior of a Laplace approximation by marginal likelihood and by validation NLL, beside a temperature.

    python -m benchmarks.laplace.prior --root DATA [--problems digits fashion-lenet] [--seeds 5] [--first-seed 10]
        [--json FILE]

A network of `benchmarks.defaults` is trained by Adam without a fifth of its training set, which is the validation set.
*mean* is that network, *temperature* the same with the temperature of the lowest validation NLL: the control, which uses
the validation set and has no posterior. The others are Kronecker-factored Laplace approximations with the probit
predictive. JSON is written after each run; what it holds is not run again.
"""

from __future__ import annotations

import argparse
import json
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
from benchmarks.defaults.training import UserModule
from benchmarks.over_seeds import mean_and_error
from benchmarks.provenance import provenance
from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes import laplace, mc_predict
from lightning_bayes.predictive import fit_temperature

SHARE: Final = 0.2  # of the training set, for validation
COLUMNS: Final = {"error": "error ↓", "nll": "NLL ↓", "calibration": "ECE ↓", "entropy_auroc": "OOD AUROC ↑"}
Row = dict[str, Any]
Logits = Callable[[Tensor], Tensor]  # log-probabilities of the predictive, [N, C]


def trained(problem: str, seed: int, root: Path) -> tuple[UserModule, TensorDataset, TensorDataset, Any]:
    """The network, what it was trained on, what it was not, and all data."""
    chosen, data = PROBLEMS[problem], PROBLEMS[problem].load(root, seed)
    rows = TensorDataset(data.train_x, data.train_y)
    parts = random_split(rows, [1 - SHARE, SHARE], torch.Generator().manual_seed(seed))
    train, validation = (TensorDataset(*rows[part.indices]) for part in parts)
    seed_everything(seed, verbose=False)
    module = UserModule(chosen, data, "adam")
    with quiet():
        quiet_trainer([], chosen.epochs).fit(module, DataLoader(train, chosen.batch, shuffle=True))
    return module.eval(), train, validation, data


def predictives(module: UserModule, train: TensorDataset, validation: TensorDataset) -> dict[str, Logits]:
    """What each method predicts."""
    with torch.no_grad():
        held_out = module(validation.tensors[0])
    temperature = fit_temperature(held_out[None], validation.tensors[1])
    found: dict[str, Logits] = {"mean": lambda x: module(x), "temperature": lambda x: module(x) / temperature}
    for subset in ("last_layer", "all"):
        for prior in ("marglik", "validation"):
            posterior = laplace(
                module,
                DataLoader(train, 100),
                subset=subset,
                prior_precision=prior,
                validation=DataLoader(validation, 100) if prior == "validation" else None,
            ).posterior
            found[f"{subset}, {prior}"] = partial(_probit, module, posterior)
    return found


def _probit(module: UserModule, posterior: Any, x: Tensor) -> Tensor:
    parts = [mc_predict(module, posterior, part, linearized="closed_form").probs for part in x.split(500)]
    return torch.cat(parts).clamp_min(1e-38).log()


def measure(problem: str, seed: int, root: Path) -> list[Row]:
    """Train once and score every method.

    Args:
        problem: Key of `benchmarks.defaults.problems.PROBLEMS`, of classes with images out of distribution.
        seed: Of split, weights and order.
        root: See there.

    Returns:
        A row for each method.
    """
    module, train, validation, data = trained(problem, seed, root)
    rows = []
    for method, logits in predictives(module, train, validation).items():
        with torch.no_grad():
            inside, outside = logits(data.test_x)[None], logits(data.ood_x)[None]
        scores = {**classification_scores(inside, data.test_y), **ood_scores(inside, outside)}
        rows.append({"problem": problem, "seed": seed, "method": method, **scores})
    return rows


def table(rows: list[Row]) -> str:
    """Markdown: means, and paired differences of the NLL to the temperature's, ± standard errors over seeds.

    Args:
        rows: From `measure`.

    Returns:
        A line per problem and method.
    """
    lines = [
        f"| problem | method | {' | '.join(COLUMNS.values())} | NLL minus temperature's | seeds |",
        "|---" * 8 + "|",
    ]
    for problem, method in dict.fromkeys((row["problem"], row["method"]) for row in rows):
        found = [row for row in rows if (row["problem"], row["method"]) == (problem, method)]
        control = {r["seed"]: r["nll"] for r in rows if (r["problem"], r["method"]) == (problem, "temperature")}
        pairs = [row["nll"] - control[row["seed"]] for row in found]
        cells = [mean_and_error([row[score] for row in found]) for score in COLUMNS]
        lines.append(f"| {problem} | {method} | {' | '.join(cells)} | {mean_and_error(pairs, '+')} | {len(found)} |")
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
    rows: list[Row] = []
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text("utf-8"))["runs"]
    known = {(row["problem"], row["seed"]) for row in rows}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for problem in options.problems:
            if (problem, seed) in known:
                continue
            rows += measure(problem, seed, options.root)
            print(f"{problem}, seed {seed}", {row["method"]: round(row["nll"], 4) for row in rows[-6:]}, flush=True)
            if options.json:
                options.json.write_text(json.dumps({**provenance(), "runs": rows}, indent=1) + "\n", "utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
