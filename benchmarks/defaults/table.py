"""Tables of results: means over seeds, and broken promises.

A callback with default arguments promises, for each problem and user's optimizer: no run diverges or stays at chance; the
error is at most one point (RMSE: 5 %) higher; NLL and calibration error are not higher by more than two standard errors of
the paired difference over seeds. A single run has no standard error, so a higher NLL or calibration error leaves its
promise undecided.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.defaults.methods import CALLBACKS, ENSEMBLE, PEER, POSTHOC, TEMPERATURE
from benchmarks.defaults.problems import PROBLEMS
from benchmarks.defaults.training import OPTIMIZERS
from benchmarks.over_seeds import standard_error, with_error

Run = Mapping[str, float]  # scores of one seed
NOISY_SCORES = ("nll", "calibration")  # compared in standard errors


def failures(method: Sequence[Run], user: Sequence[Run], is_regression: bool, chance: float) -> list[str]:
    """The broken promises, one word each; undecided promises are not among them."""
    broken = []
    if any(not math.isfinite(run["nll"]) or run["error"] >= 0.95 * chance for run in method):
        broken.append("chance")
    error, limit = _mean(method, "error"), _mean(user, "error")
    if error > (1.05 * limit if is_regression else limit + 0.01):
        broken.append("error")
    for name in NOISY_SCORES:
        mean, error_of_mean = paired(method, user, name)
        if mean > 2 * error_of_mean:
            broken.append(name)
    return broken


def undecided(method: Sequence[Run], user: Sequence[Run]) -> list[str]:
    """The promises that a single run cannot decide, because its score is higher but the standard error is unknown."""
    return [name for name in NOISY_SCORES if len(method) == 1 and paired(method, user, name)[0] > 0]


def paired(method: Sequence[Run], user: Sequence[Run], name: str) -> tuple[float, float]:
    """Mean of the paired difference, NaN if a run diverged; and its standard error, NaN also for a single seed."""
    differences = [a[name] - b[name] for a, b in zip(method, user, strict=True)]
    if not all(map(math.isfinite, differences)):
        return math.nan, math.nan
    return statistics.mean(differences), standard_error(differences)


def _mean(runs: Sequence[Run], name: str) -> float:
    return statistics.mean(run[name] for run in runs)


SCORES = ("error", "nll", "calibration")
OOD = ("entropy_auroc", "mi_auroc")
Record = dict[str, Any]
Key = tuple[str, str, str]  # problem, the user's optimizer, method


class Row(NamedTuple):
    """One method on one problem."""

    key: Key
    seeds: int
    means: tuple[float, ...]  # of `SCORES` and `OOD`
    broken: list[str] | None  # promises, see `benchmarks.defaults.table`; None without runs of the user's optimizer
    undecided: list[str]  # promises that a single seed cannot decide


def rows(records: Sequence[Record]) -> list[Row]:
    """One row with means over seeds per problem, optimizer and method, from one record per run."""
    groups = _by_key(records)
    in_order = sorted(groups.items(), key=lambda item: _order(item[0]))
    return [_row(key, by_seed, groups.get((*key[:2], "user"), {})) for key, by_seed in in_order]


def _by_key(records: Sequence[Record]) -> dict[Key, dict[int, Record]]:
    groups: dict[Key, dict[int, Record]] = {}
    for record in records:
        key = record["problem"], record["optimizer"], record["method"]
        groups.setdefault(key, {})[record["seed"]] = record
    return groups


def _row(key: Key, by_seed: dict[int, Record], user: dict[int, Record]) -> Row:
    means = tuple(
        statistics.mean(record.get(name, math.nan) for record in by_seed.values()) for name in (*SCORES, *OOD)
    )
    seeds = sorted(by_seed.keys() & user.keys())
    if key[2] == "user" or not seeds:
        return Row(key, len(by_seed), means, None, [])
    runs, user_runs = [by_seed[seed] for seed in seeds], [user[seed] for seed in seeds]
    broken = failures(runs, user_runs, PROBLEMS[key[0]].is_regression, runs[0]["chance"])
    return Row(key, len(by_seed), means, broken, undecided(runs, user_runs))


def _order(key: Key) -> tuple[int, int, int, str]:
    methods = [*CALLBACKS, *POSTHOC, ENSEMBLE, TEMPERATURE, PEER]
    name = next(name for name in methods if re.match(rf"{name}([@~]|$)", key[2]))
    return list(PROBLEMS).index(key[0]), list(OPTIMIZERS).index(key[1]), methods.index(name), key[2]


HEAD = ("problem", "optimizer", "method", "seeds", "error", "NLL", "calibration", "H", "MI")


def table(records: Sequence[Record]) -> str:
    """Format all rows in Markdown, then the number of problems on which each method keeps every promise."""
    all_rows = rows(records)
    lines = [(*row.key, str(row.seeds), *map(_number, row.means), _words(row)) for row in all_rows]
    return "\n".join([_markdown((*HEAD, "broken"), lines), "", *kept(all_rows)])


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def differences(records: Sequence[Record], other: str) -> str:
    """Format mean and standard error of each method's paired difference from another method."""
    groups, lines = _by_key(records), []
    for key, by_seed in sorted(groups.items(), key=lambda item: _order(item[0])):
        base = groups.get((*key[:2], other), {})
        seeds = sorted(by_seed.keys() & base.keys())
        if key[2] != other and seeds:
            of_method, of_other = ([runs[seed] for seed in seeds] for runs in (by_seed, base))
            cells = (_difference(of_method, of_other, name) for name in (*SCORES, *OOD))
            lines.append((*key, str(len(seeds)), *cells))
    return _markdown(HEAD, lines)


def _difference(runs: Sequence[Record], others: Sequence[Record], name: str) -> str:
    if any(name not in run for run in (*runs, *others)):
        return "–"
    return with_error(*paired(runs, others, name), sign="+")


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


def _words(row: Row) -> str:
    if row.broken is None:
        return "–"
    return ", ".join([*row.broken, *(f"{name} undecided" for name in row.undecided)]) or "none"


def kept(all_rows: Sequence[Row]) -> list[str]:
    """One line per optimizer and method: on how many problems it keeps every promise, of those that are decided."""
    verdicts: dict[tuple[str, str], list[Row]] = {}
    for row in all_rows:
        if row.broken is not None and (row.broken or not row.undecided):
            verdicts.setdefault(row.key[1:], []).append(row)
    return [
        f"- with {optimizer}, {method} keeps every promise on {sum(not row.broken for row in group)} of "
        f"{len(group)} problems"
        for (optimizer, method), group in sorted(verdicts.items(), key=lambda item: _order(("digits", *item[0])))
    ]
