"""What the end of a fit gains by a temperature and a width: the shrinkage of the package beside others, on fresh seeds.

    python -m benchmarks.defaults.temperature --root DATA [--problems svhn quality] [--methods user vogn] [--first-seed 700]
        [--seeds 3] [--json FILE] [--table]

`DATA` has torchvision's folders, SVHN's ``test_32x32.mat``, and the UCI sets in ``uci``. Each fit is calibrated on twenty
validation sets of 34, 100, 300 and 1,000 examples, and scored on all other held-out examples. Rules:

* ``threshold``: the maximum-likelihood T if it lowers the NLL by two standard errors and .001 and ten are wrong, as before;
* ``fitted``: the maximum-likelihood T;
* ``T σ``: log T is shrunk with standard deviation σ;
* ``c σ``: T with σ = .2, and a width c, whose logarithm is shrunk with σ.

A regression has no temperature, and its noise is fitted at each width.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from benchmarks.defaults.pools import METHODS, PROBLEMS, REGRESSIONS, WIDE, Pool, held_out
from benchmarks.defaults.study import Record, run_study, study_parser
from benchmarks.over_seeds import standard_error, with_error
from lightning_bayes.likelihood.scoring import fit_noise_std
from lightning_bayes.predictive.temperature import LARGEST

VALIDATION: Final = (34, 100, 300, 1_000)
SETS: Final = 20  # validation sets of each size
LOG_T: Final = torch.linspace(-math.log(LARGEST), math.log(LARGEST), 121)
LOG_C: Final = torch.arange(-4, 5) / 2 * math.log(2)  # from 1/4 to 4, in factors of √2
AS_TRAINED: Final = (len(LOG_C) // 2, len(LOG_T) // 2)  # c = 1, T = 1
RULES: Final[dict[str, tuple[float, float]]] = {  # standard deviations of log T and log c
    "fitted": (math.inf, 0),
    "T .1": (0.1, 0),
    "T .2": (0.2, 0),
    "T .3": (0.3, 0),
    "c .5": (0.2, 0.5),
    "c 1": (0.2, 1.0),
}
Losses = Callable[[Tensor], Tensor]  # NLL of each example at the widths and temperatures, given the validation rows


def losses_of(pool: Pool, is_wide: bool) -> Losses:
    """The NLL ``[widths, temperatures, N]`` of held-out examples; infinite at widths that a posterior does not have."""
    outputs = cache(lambda row: pool.outputs_at(float(LOG_C[row].exp())) if is_wide else pool.outputs_at(1.0))
    rows = [row for row in range(len(LOG_C)) if is_wide or row == AS_TRAINED[0]]

    @cache
    def of_classes() -> Tensor:
        losses = torch.full((len(LOG_C), len(LOG_T), len(pool.targets)), math.inf)
        for row, (column, log_t) in product(rows, enumerate(LOG_T)):
            log_probs = (outputs(row) / log_t.exp()).log_softmax(-1)[:, torch.arange(len(pool.targets)), pool.targets]
            losses[row, column] = math.log(len(log_probs)) - log_probs.logsumexp(0)
        return losses

    def of_values(validation: Tensor) -> Tensor:
        losses = torch.full((len(LOG_C), len(LOG_T), len(pool.targets)), math.inf)
        for row in rows:
            std = fit_noise_std(outputs(row)[:, validation], pool.targets[validation])
            log_density = torch.distributions.Normal(outputs(row), std).log_prob(pool.targets)[..., 0]
            losses[row, AS_TRAINED[1]] = math.log(len(log_density)) - log_density.logsumexp(0)
        return losses

    return of_values if pool.targets.is_floating_point() else lambda validation: of_classes()


def chosen(losses: Tensor, log_t_std: float, log_c_std: float) -> tuple[int, int]:
    """The width and the temperature on the grid that a rule takes; a standard deviation of 0 leaves the factor at 1."""
    objective = losses.double().sum(-1) + (LOG_T / log_t_std).square() / 2
    if log_c_std:
        objective = objective + (LOG_C / log_c_std).square()[:, None] / 2
    else:
        objective[torch.arange(len(LOG_C)) != AS_TRAINED[0]] = math.inf
    row, column = divmod(int(objective.argmin()), len(LOG_T))
    return row, column


def over_threshold(losses: Tensor, wrong: int) -> tuple[int, int]:
    """The maximum-likelihood temperature if it wins by enough, as the package chose before the shrinkage."""
    found = chosen(losses, math.inf, 0)
    gains = losses[AS_TRAINED] - losses[found]
    smallest = max(2 * float(gains.std()) / math.sqrt(len(gains)), 1e-3)
    return found if float(gains.mean()) > smallest and wrong >= 10 else AS_TRAINED


def records(pool: Pool, is_wide: bool) -> Iterator[Record]:
    """For each size of the validation set, the NLL as trained and what each rule adds: mean and 90th percentile of sets."""
    losses_at, total, has_classes = losses_of(pool, is_wide), len(pool.targets), not pool.targets.is_floating_point()
    wrong = pool.outputs_at(1.0).softmax(-1).mean(0).argmax(-1) != pool.targets.flatten()
    for count in VALIDATION:
        if count > total // 2:
            return
        before: list[float] = []
        changes: dict[str, list[float]] = {name: [] for name in ("threshold", *RULES)}
        for number in range(SETS):
            order = torch.randperm(total, generator=torch.Generator().manual_seed(number))
            validation, test = order[:count], order[count:]
            losses = losses_at(validation)
            taken = {name: chosen(losses[:, :, validation], *stds) for name, stds in RULES.items()}
            taken["threshold"] = over_threshold(losses[:, :, validation], int(wrong[validation].sum()))
            before.append(float(losses[AS_TRAINED][test].mean()))
            for name, found in taken.items():
                changes[name].append(float(losses[found][test].mean()) - before[-1])
        shown = {
            name: each
            for name, each in changes.items()
            if (has_classes or name[0] == "c") and (is_wide or name[0] != "c")
        }
        tails = {f"{name} p90": float(torch.tensor(each).quantile(0.9)) for name, each in shown.items()}
        means = {name: statistics.mean(each) for name, each in shown.items()}
        yield {"examples": count, "before": statistics.mean(before), **means, **tails}


def table(rows: Sequence[Record]) -> str:
    """A Markdown table: mean ± standard error over fits, in brackets the mean 90th percentile over validation sets."""
    names = ("threshold", "T .1", "T .2", "T .3", "c .5", "c 1")
    lines = [
        f"| problem | method | n | fits | as trained | {' | '.join(names)} | user, T |",
        "|" + "---|" * (len(names) + 6),
    ]
    for (problem, method, count), of in _cells(rows).items():
        user = _cells(rows).get((problem, "user", count), [])
        fitted = f"{statistics.mean(row['before'] + row['fitted'] for row in user):.4f}" if user else "–"
        cells = [_cell(of, name) if name in of[0] else "–" for name in names]
        before = f"{statistics.mean(row['before'] for row in of):.4f}"
        lines.append(f"| {problem} | {method} | {count} | {len(of)} | {before} | {' | '.join(cells)} | {fitted} |")
    return "\n".join(lines)


def verdicts(rows: Sequence[Record]) -> str:
    """For each rule, its mean change, and the problems where it raises the NLL by more than one standard error."""
    lines = []
    for name in ("threshold", *RULES):
        of = {key: [row[name] for row in cell] for key, cell in _cells(rows).items() if name in cell[0]}
        raised = [
            f"{' '.join(map(str, key))} {with_error(statistics.mean(changes), standard_error(changes), sign='+')}"
            for key, changes in of.items()
            if statistics.mean(changes) > max(standard_error(changes), 5e-5)
        ]
        mean = statistics.mean(statistics.mean(changes) for changes in of.values())
        lines.append(
            f"{name:9}  {mean:+.4f} on average, raised in {len(raised)} of {len(of)}: {'; '.join(raised) or 'none'}"
        )
    return "\n".join(lines)


def _cells(rows: Sequence[Record]) -> dict[tuple[str, str, int], list[Record]]:
    cells: dict[tuple[str, str, int], list[Record]] = {}
    for row in sorted(
        rows, key=lambda row: (list(PROBLEMS).index(row["problem"]), METHODS.index(row["method"]), row["examples"])
    ):
        cells.setdefault((row["problem"], row["method"], row["examples"]), []).append(row)
    return cells


def _cell(rows: Sequence[Record], name: str) -> str:
    changes = [row[name] for row in rows]
    shown = with_error(statistics.mean(changes), standard_error(changes), sign="+")
    return f"{shown} ({statistics.mean(row[f'{name} p90'] for row in rows):+.4f})"


def run(root: Path, problem: str, method: str, seed: int) -> Iterator[Record]:
    """Fit once, and calibrate on each size of the validation set; a regression has no rule without a width."""
    if problem not in REGRESSIONS or method in WIDE:
        yield from records(held_out(PROBLEMS[problem], root, seed, method), method in WIDE)


def main() -> None:
    """Run the missing fits, save them, and print the table and the verdicts."""
    parser = study_parser(__doc__, first_seed=700, seeds=3, problems=PROBLEMS, methods=METHODS)
    rows = run_study(parser.parse_args(), ("problems", "methods"), run)
    print(table(rows), verdicts(rows), sep="\n\n")


if __name__ == "__main__":
    main()
