"""The table of the defaults: means over seeds, and the promises that are broken."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.defaults.methods import CALLBACKS, ENSEMBLE, PEER, POSTHOC
from benchmarks.defaults.problems import PROBLEMS
from benchmarks.defaults.training import OPTIMIZERS
from benchmarks.defaults.verdict import failures, paired

SCORES = ("error", "nll", "calibration")
OOD = ("entropy_auroc", "mi_auroc")
Record = dict[str, Any]
Key = tuple[str, str, str]  # problem, the user's optimizer, method


class Row(NamedTuple):
    """One method on one problem; `broken` lists promises, and is None where there is nothing to compare.

    `is_told` says whether any is broken with unpaired standard errors too, see `benchmarks.defaults.verdict`.
    """

    key: Key
    seeds: int
    means: tuple[float, ...]  # of `SCORES` and `OOD`
    broken: list[str] | None
    is_told: bool


def rows(records: Sequence[Record]) -> list[Row]:
    """Means over seeds, in the order of problems, optimizers and methods.

    Args:
        records: One for each run.

    Returns:
        A row for each problem, optimizer and method.
    """
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
    paired, unpaired = (_broken(by_seed, user, key[2], is_paired) for is_paired in (True, False))
    return Row(key, len(by_seed), means, paired, bool(unpaired))


def _broken(method: dict[int, Record], user: dict[int, Record], name: str, is_paired: bool) -> list[str] | None:
    seeds = sorted(method.keys() & user.keys())
    if name == "user" or not seeds:
        return None
    problem = PROBLEMS[user[seeds[0]]["problem"]]
    mine, theirs = [method[seed] for seed in seeds], [user[seed] for seed in seeds]
    return failures(mine, theirs, problem.is_regression, mine[0]["chance"], is_paired)


def _order(key: Key) -> tuple[int, int, int, str]:
    methods = [*CALLBACKS, *POSTHOC, ENSEMBLE, PEER]
    name = next(name for name in methods if re.match(rf"{name}([@~/+]|$)", key[2]))
    return list(PROBLEMS).index(key[0]), list(OPTIMIZERS).index(key[1]), methods.index(name), key[2]


def table(records: Sequence[Record], markdown: bool = False) -> str:
    """Write the rows, and on how many problems each method keeps every promise.

    Args:
        records: One for each run.
        markdown: Whether the rows shall be a Markdown table.

    Returns:
        The text.
    """
    found = rows(records)
    lines: list[tuple[str, ...]] = [
        ("problem", "optimizer", "method", "seeds", "error", "NLL", "calibration", "H", "MI", "broken")
    ]
    if markdown:
        lines.append(("---",) * 10)
    lines += [(*row.key, str(row.seeds), *map(_number, row.means), _words(row.broken)) for row in found]
    plain = "{:16}{:16}{:15}{:>6}{:>10}{:>10}{:>13}{:>10}{:>10}  {}"
    shape = "| " + " | ".join(["{}"] * 10) + " |" if markdown else plain
    return "\n".join([*(shape.format(*line) for line in lines), "", *kept(found)])


def differences(records: Sequence[Record], other: str, markdown: bool = False) -> str:
    """Write mean and standard error of each method's paired difference from another one.

    Args:
        records: One for each run.
        other: The other method.
        markdown: Whether the rows shall be a Markdown table.

    Returns:
        The text.
    """
    groups = _by_key(records)
    lines = [("problem", "optimizer", "method", "seeds", "error", "NLL", "calibration", "H", "MI")]
    if markdown:
        lines.append(("---",) * 9)
    for key, by_seed in sorted(groups.items(), key=lambda item: _order(item[0])):
        base = groups.get((*key[:2], other), {})
        seeds = sorted(by_seed.keys() & base.keys())
        if key[2] != other and seeds:
            mine, theirs = ([runs[seed] for seed in seeds] for runs in (by_seed, base))
            cells = (_difference(mine, theirs, name) for name in (*SCORES, *OOD))
            lines.append((*key, str(len(seeds)), *cells))
    shape = "| " + " | ".join(["{}"] * 9) + " |" if markdown else "{:16}{:16}{:15}{:>6}" + "{:>19}" * 5
    return "\n".join(shape.format(*line) for line in lines)


def _difference(mine: Sequence[Record], theirs: Sequence[Record], name: str) -> str:
    if any(name not in run for run in (*mine, *theirs)):
        return "–"
    return "{:+.4f} ± {:.4f}".format(*paired(mine, theirs, name))


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


def _words(broken: list[str] | None) -> str:
    return "–" if broken is None else ", ".join(broken) or "none"


def kept(found: Sequence[Row]) -> list[str]:
    """Say how many problems each method keeps every promise on.

    Args:
        found: From `rows`.

    Returns:
        A line for each of the user's optimizers and each method.
    """
    verdicts: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        if row.broken is not None:
            verdicts.setdefault(row.key[1:], []).append(row)
    return [
        f"- beside {optimizer}, {method} keeps every promise on {sum(not row.broken for row in all_rows)} of "
        f"{len(all_rows)} problems ({sum(not row.is_told for row in all_rows)} with unpaired standard errors)"
        for (optimizer, method), all_rows in sorted(verdicts.items(), key=lambda item: _order(("digits", *item[0])))
    ]
