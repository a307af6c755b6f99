"""Active learning on regressions, Zhang et al. 2018, Table 3.

    python -m benchmarks.papers.active_learning --root UCI [--sets boston yacht] [--methods noisy_kfac] [--trials 40]
        [--epochs 1000] [--mc-samples 10] [--samples 1000] [--json FILE]

In each trial a network with 10 hidden units starts with 20 labelled rows. After each of 10 fits from scratch, one row of the
pool is labelled: the row with the largest predictive variance (active, suffix A in the paper) or a random row (suffix R).
JSON is written after each set and method; finished ones are skipped. The paper trains for 20 000 epochs and does not state
the number of weight samples per step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Generator, Tensor

from benchmarks.papers import PUBLISHED
from benchmarks.papers.predictive_variance import LEARNERS, SETTING
from benchmarks.papers.regression.data import Setting, Splits, stack_splits
from benchmarks.papers.regression.learner import Problem, evaluate
from benchmarks.papers.uci import METHODS
from benchmarks.provenance import save_json, saved_rows
from lightning_bayes.predictive import top_rows, variance_score
from lightning_bayes.zoo.data.uci import UCISet, read_uci

SETS: Final = tuple(PUBLISHED["zhang2018_table3_errors"])
NUM_TRAIN: Final = 20
NUM_TEST: Final = 100


@dataclass
class Trials:
    """Rows of 2 T models: T active learners, which label the row of largest predictive variance, then T random learners."""

    stored: UCISet
    labelled: Tensor
    test: Tensor
    pool: Tensor
    generator: Generator

    @classmethod
    def draw(cls, stored: UCISet, count: int, seed: int = 0) -> Trials:
        """Draw `count` trials; both learners of a trial start from the same rows."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.stack([torch.randperm(len(stored.targets), generator=generator) for _ in range(count)]).repeat(
            2, 1
        )
        labelled, test, pool = rows.split([NUM_TRAIN, NUM_TEST, rows.shape[1] - NUM_TRAIN - NUM_TEST], 1)  # type: ignore[no-untyped-call]
        return cls(stored, labelled, test, pool, generator)

    @property
    def count(self) -> int:
        """T."""
        return len(self.labelled) // 2

    def splits(self) -> Splits:
        """Training and test rows of each model, standardised with its labelled rows."""
        return stack_splits(self.stored, list(zip(self.labelled, self.test, strict=True)))

    def pool_inputs(self) -> Tensor:
        """The pool's rows under each model's standardisation, ``[2 T, p, D + 1]``."""
        return stack_splits(self.stored, list(zip(self.labelled, self.pool, strict=True))).test.inputs

    def label(self, variances: Tensor) -> None:
        """Label one row of each model's pool; active learners select by predictive variances ``[2 T, p]``."""
        active = torch.stack([top_rows(row, 1)[0] for row in variances[: self.count]])
        drawn = torch.randint(self.pool.shape[1], (self.count,), generator=self.generator)
        chosen = torch.cat([active, drawn])[:, None]
        self.labelled = torch.cat([self.labelled, self.pool.gather(1, chosen)], 1)
        remains = torch.ones_like(self.pool, dtype=torch.bool).scatter_(1, chosen, False)
        self.pool = self.pool[remains].view(len(self.pool), -1)


Row = dict[str, Any]


class Estimate(NamedTuple):
    """A mean over trials and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Tensor) -> Estimate:
        """Estimate from values ``[T]``."""
        return cls(float(values.mean()), float(values.std() / len(values) ** 0.5))

    def __str__(self) -> str:
        """Format with three decimals."""
        return f"{self.mean:.3f} ± {self.error:.3f}"


class LastFit(NamedTuple):
    """Errors of the last fit: random, active, and active minus random in the same trial."""

    random: Estimate
    active: Estimate
    paired: Estimate


def last(row: Row) -> LastFit:
    """Errors of the last fit, from a row with ``rmse`` ``[fits, 2 T]``."""
    active, random = torch.tensor(row["rmse"][-1]).double().chunk(2)
    return LastFit(Estimate.of(random), Estimate.of(active), Estimate.of(active - random))


def table(rows: list[Row]) -> str:
    """Format a Markdown table: one line per set and method, with the published values."""
    lines = [
        "| set | method | random | active | active − random, paired | published: random, active |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        published = PUBLISHED["zhang2018_table3"].get(row["method"], {}).get(row["set"])
        text = "–" if published is None else f"{published[0]:.3f}, {published[1]:.3f}"
        cells = [row["set"], METHODS[row["method"]].title, *map(str, last(row)), text]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def promises(rows: list[Row]) -> Iterator[str]:
    """Whether selection by variance beats random selection, and a structured posterior beats mean field."""
    kfac = {row["set"]: last(row) for row in rows if row["method"] == "noisy_kfac"}
    adam = {row["set"]: last(row) for row in rows if row["method"] == "noisy_adam_fisher"}
    better = [name for name, final in kfac.items() if final.paired.mean < 0]
    yield _line(len(better), len(kfac), "Noisy K-FAC, active below random", better)
    both = [name for name in kfac if name in adam]
    better = [name for name in both if kfac[name].active.mean <= adam[name].active.mean]
    yield _line(len(better), len(both), "active, Noisy K-FAC at most Noisy Adam", better)
    for name in (name for name in SETS if name in kfac):
        pairs = zip(
            kfac[name][:2],
            PUBLISHED["zhang2018_table3"]["noisy_kfac"][name],
            PUBLISHED["zhang2018_table3_errors"][name],
            strict=True,
        )
        away = [(ours.mean - mean) / (ours.error**2 + error**2) ** 0.5 for ours, mean, error in pairs]
        yield f"{name}, Noisy K-FAC against the paper, in standard errors: random {away[0]:+.1f}, active {away[1]:+.1f}"


def _line(count: int, of: int, claim: str, names: list[str]) -> str:
    verdict = "kept" if 4 * count >= 3 * of > 0 else "BROKEN"
    return f"{verdict}: {claim} on {count} of {of} sets ({', '.join(names) or 'none'})"


LEARNED: Final = ("bbb", "noisy_adam_fisher", "noisy_kfac")
FITS: Final = 10  # with nine new labels between them


@torch.no_grad()
def errors(method: str, trials: Trials, setting: Setting, fits: int = FITS) -> Tensor:
    """Test RMSE after each fit."""
    rmse = []
    for number in range(fits):
        learner = LEARNERS[method](Problem.of(trials.splits(), setting, seed=number))
        learner.train()
        rmse.append(evaluate(learner).rmse)
        if number + 1 < fits:
            pool = trials.pool_inputs()
            samples = torch.stack([learner.predict(pool) for _ in range(setting.eval_samples)])
            trials.label(variance_score(samples.flatten(1)).view(samples.shape[1:]))
    return torch.stack(rmse)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the UCI sets")
    parser.add_argument("--sets", nargs="+", default=["boston", "concrete", "energy", "yacht"], choices=SETS)
    parser.add_argument("--methods", nargs="+", default=list(LEARNED), choices=LEARNED)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--fits", type=int, default=FITS)
    parser.add_argument("--samples", type=int, default=SETTING.eval_samples, help="weight samples per prediction")
    parser.add_argument(
        "--mc-samples", type=int, default=SETTING.mc_samples[0], help="weight samples per training step"
    )
    parser.add_argument("--json", type=Path, help="written after each set and method; finished ones are skipped")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing, and print the table."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.trials < 2:
        parser.error(f"--trials {options.trials}: a standard error over trials needs at least 2")
    torch.set_num_threads(1)
    samples = (options.mc_samples, options.mc_samples)
    setting = replace(SETTING, epochs=options.epochs, mc_samples=samples, eval_samples=options.samples)
    rows: list[Row] = saved_rows(options.json)
    done = {(row["set"], row["method"]) for row in rows}
    for name, method in product(options.sets, options.methods):
        if (name, method) in done:
            continue
        start = time.perf_counter()
        rmse = errors(method, Trials.draw(read_uci(options.root, name), options.trials), setting, options.fits)
        seconds = time.perf_counter() - start
        rows.append({"set": name, "method": method, "seconds": seconds, "rmse": rmse.tolist()})
        print(f"{name}, {method}: random, active {last(rows[-1])[:2]}, {seconds:.0f} s", flush=True)
        save_json(options.json, {"setting": asdict(setting), "results": rows})
    print(table(rows))
    print("\n".join(f"- {line}" for line in promises(rows)))


if __name__ == "__main__":
    main()
