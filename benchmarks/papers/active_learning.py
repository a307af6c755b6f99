"""Active learning on regressions, Zhang et al. 2018, Table 3.

    python -m benchmarks.papers.active_learning --root UCI [--sets boston yacht] [--methods noisy_kfac] [--trials 40]
        [--epochs 20000] [--mc-samples 1] [--samples 1000] [--json FILE]

In each trial a network with 10 hidden units starts with 20 labelled rows. After each of 10 fits from scratch, one row of the
pool is labelled: the row with the largest predictive variance (active, suffix A in the paper) or a random row (suffix R).
JSON is written after each fit, and a run with an existing file goes on from it. The paper does not state the weight samples
per step, and the trials are those of Hernández-Lobato & Adams 2015. On one core, 20,000 epochs of 40 trials take one hour
(Bayes by Backprop) to two hours (Noisy K-FAC) a set.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.over_seeds import standard_error, with_error
from benchmarks.papers import PUBLISHED
from benchmarks.papers.predictive_variance import LEARNERS, SETTING, TITLES
from benchmarks.papers.regression.data import Setting, Splits, stack_splits
from benchmarks.papers.regression.learner import Problem, evaluate
from benchmarks.provenance import save_json, saved_rows
from lightning_bayes.zoo.data.uci import UCISet, read_uci

SETS: Final = tuple(PUBLISHED["zhang2018_table3_errors"])
LEARNED: Final = ("bbb", "noisy_adam_fisher", "noisy_kfac")
NUM_TRAIN: Final = 20
NUM_TEST: Final = 100
FITS: Final = 10  # with nine new labels between them
Row = dict[str, Any]


class Trials(NamedTuple):
    """Rows of 2 T models: T active learners, which label the row of largest predictive variance, then T random learners."""

    stored: UCISet
    labelled: Tensor  # [2 T, n]
    test: Tensor
    pool: Tensor

    @classmethod
    def draw(cls, stored: UCISet, count: int) -> Trials:
        """Draw `count` trials; both learners of a trial start from the same rows."""
        generator = torch.Generator().manual_seed(0)
        orders = [torch.randperm(len(stored.targets), generator=generator) for _ in range(count)]
        rows = torch.stack(orders).repeat(2, 1)
        return cls(stored, *rows.tensor_split([NUM_TRAIN, NUM_TRAIN + NUM_TEST], 1))

    def against(self, rows: Tensor) -> Splits:
        """Rows ``[2 T, m]`` as the test rows of each model, standardised with its labelled rows."""
        return stack_splits(self.stored, list(zip(self.labelled, rows, strict=True)))

    def label(self, variances: Tensor) -> Trials:
        """Label one row of each model's pool; active learners select by predictive variances ``[2 T, p]``."""
        count, generator = len(self.pool) // 2, torch.Generator().manual_seed(self.pool.shape[1])
        active = variances[:count].argmax(1)
        drawn = torch.randint(self.pool.shape[1], (count,), generator=generator)
        chosen = torch.cat([active, drawn])[:, None]
        remains = torch.ones_like(self.pool, dtype=torch.bool).scatter_(1, chosen, False)
        labelled = torch.cat([self.labelled, self.pool.gather(1, chosen)], 1)
        return self._replace(labelled=labelled, pool=self.pool[remains].view(len(self.pool), -1))


@torch.no_grad()
def rounds(row: Row, trials: Trials, setting: Setting, fits: int = FITS) -> Iterator[None]:
    """Fit, test and label until there are `fits`; the row keeps the test RMSE ``[fits, 2 T]`` and the labelled rows."""
    if row["rmse"]:  # after a fit that was not the last, its label is in the row
        labelled = torch.tensor(row["labelled"])
        is_labelled = (trials.pool[:, :, None] == labelled[:, None, NUM_TRAIN:]).any(-1)
        trials = trials._replace(labelled=labelled, pool=trials.pool[~is_labelled].view(len(labelled), -1))
    for number in range(len(row["rmse"]), fits):
        start = time.process_time()
        learner = LEARNERS[row["method"]](Problem.of(trials.against(trials.test), setting, seed=number))
        learner.train()
        row["rmse"].append(evaluate(learner).rmse.tolist())
        pool = trials.against(trials.pool).test.inputs
        samples = torch.stack([learner.predict(pool) for _ in range(setting.eval_samples)])
        trials = trials.label(samples.var(0))
        row["labelled"] = trials.labelled.tolist()
        row["seconds"] += time.process_time() - start
        yield


class Last(NamedTuple):
    """Test RMSE of the last fit: mean over trials and standard error of random, active, and their paired difference."""

    random: tuple[float, float]
    active: tuple[float, float]
    paired: tuple[float, float]

    @classmethod
    def of(cls, row: Row) -> Last:
        """From a row with ``rmse`` ``[fits, 2 T]``."""
        active, random = torch.tensor(row["rmse"][-1]).double().chunk(2)
        values = (random, active, active - random)
        return cls(*((float(value.mean()), standard_error(value.tolist())) for value in values))


def table(rows: list[Row]) -> str:
    """Format a Markdown table: one line per set and method, with the published values."""
    lines = [
        "| set | method | fits | random | active | active − random, paired | published: random, active |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in (row for row in rows if row["rmse"]):
        published = PUBLISHED["zhang2018_table3"].get(row["method"], {}).get(row["set"], ())
        cells = [row["set"], TITLES[row["method"]], str(len(row["rmse"]))]
        cells += [with_error(*value, digits=3) for value in Last.of(row)]
        lines.append(f"| {' | '.join([*cells, ', '.join(f'{value:.3f}' for value in published) or '–'])} |")
    return "\n".join(lines)


def promises(rows: list[Row]) -> Iterator[str]:
    """Whether selection by variance beats random selection, and a structured posterior beats mean field."""
    found = {(row["set"], row["method"]): Last.of(row) for row in rows if len(row["rmse"]) == FITS}
    kfac = [name for name in SETS if (name, "noisy_kfac") in found]
    better = [name for name in kfac if found[name, "noisy_kfac"].paired[0] < 0]
    yield _line("Noisy K-FAC, active below random", better, kfac)
    both = [name for name in kfac if (name, "noisy_adam_fisher") in found]
    better = [n for n in both if found[n, "noisy_kfac"].active[0] <= found[n, "noisy_adam_fisher"].active[0]]
    yield _line("active, Noisy K-FAC at most Noisy Adam", better, both)


def _line(claim: str, kept: list[str], of: list[str]) -> str:
    verdict = "kept" if 4 * len(kept) >= 3 * len(of) > 0 else "BROKEN" if of else "not measured"
    return f"{verdict}: {claim} on {len(kept)} of {len(of)} sets ({', '.join(kept) or 'none'})"


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the UCI sets")
    parser.add_argument("--sets", nargs="+", default=["boston", "concrete", "energy", "yacht"], choices=SETS)
    parser.add_argument("--methods", nargs="+", default=list(LEARNED), choices=LEARNED)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=SETTING.epochs)
    parser.add_argument("--samples", type=int, default=SETTING.eval_samples, help="weight samples per prediction")
    parser.add_argument("--mc-samples", type=int, default=1, help="weight samples per training step")
    parser.add_argument("--json", type=Path, help="written after each fit, and continued")
    options = parser.parse_args(arguments)
    if options.trials < 2:
        parser.error(f"--trials {options.trials}: a standard error over trials needs at least 2")
    torch.set_num_threads(1)
    counts = (options.mc_samples, options.mc_samples)
    setting = replace(SETTING, epochs=options.epochs, mc_samples=counts, eval_samples=options.samples)
    settings = {"trials": options.trials, "setting": asdict(setting)}
    rows: list[Row] = saved_rows(options.json, **settings)
    for name, method in product(options.sets, options.methods):
        row = next((row for row in rows if (row["set"], row["method"]) == (name, method)), None)
        if row is None:
            rows.append(row := {"set": name, "method": method, "seconds": 0.0, "rmse": [], "labelled": []})
        for _ in rounds(row, Trials.draw(read_uci(options.root, name), options.trials), setting):
            save_json(options.json, {**settings, "results": rows})
    print(table(rows))
    print("\n".join(f"- {line}" for line in promises(rows)))


if __name__ == "__main__":
    main()
