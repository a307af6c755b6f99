"""Correlation of predictive variances with those of Hamiltonian Monte Carlo, Zhang et al. 2018, Table 4.

    python -m benchmarks.papers.predictive_variance --root UCI [--sets boston yacht] [--epochs 20000] [--json FILE]

In each of ten trials a network with 10 hidden units trains on 20 rows and predicts the variance at 100 others. The table has
the correlation with the variance of NUTS, averaged over trials; the agreement of two halves of its chains shows how exact
NUTS is. NUTS is numpyro's, of the extra ``bench``, which compiles all chains of a trial into one program. JSON is written
after each set; finished sets are skipped. On one core, a set takes about 40 minutes, and with ``--epochs 2500`` six.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.over_seeds import mean_and_error, with_error
from benchmarks.papers import PUBLISHED
from benchmarks.papers.regression.data import Setting, Splits, stack_splits
from benchmarks.papers.regression.learner import Problem
from benchmarks.papers.uci import METHODS, SETS
from benchmarks.provenance import save_json, saved_rows
from lightning_bayes.zoo.data.uci import read_uci
from lightning_bayes.zoo.tasks.noise import PUBLISHED_PRIOR

NUM_TRAIN: Final = 20
NUM_QUERY: Final = 100
TITLES: Final = {"nuts": "NUTS, half against half"} | {name: method.title for name, method in METHODS.items()}
SETTING: Final = Setting(  # Zhang et al. 2018, C.3; the other values as in C.1
    20_000,
    batch=(10, 10),
    mc_samples=(10, 10),
    lr=0.01,
    betas=(0.9, 0.99),
    decays=True,
    num_hidden=10,
    eval_samples=1000,
)
LEARNERS: Final = {
    name: METHODS[name].build for name in ("bbb", "noisy_adam_fisher", "noisy_kfac", "block_tridiagonal")
}
Row = dict[str, Any]


@torch.no_grad()
def variances(method: str, trials: Splits, setting: Setting) -> Tensor:
    """Train all trials at once; the variance of f at the queries, ``[R, m]``."""
    learner = LEARNERS[method](Problem.of(trials, setting, seed=0))
    learner.train()
    return torch.stack([learner.predict(trials.test.inputs) for _ in range(setting.eval_samples)]).var(0)


@dataclass(frozen=True)
class Chains:
    """Length of the chains."""

    chains: int = 4
    warm_up: int = 1000
    samples: int = 2000
    max_tree_depth: int = 8


class Reference(NamedTuple):
    """Predictive variances of NUTS, ``[R, m]``, and of each half of its chains, ``[2, R, m]``."""

    variances: Tensor
    halves: Tensor


def reference(trials: Splits, num_hidden: int, prior_precision: float, chains: Chains) -> Reference:
    """Sample the posterior of every trial with H hidden units and prior precision δ."""
    import jax
    from numpyro.infer import MCMC, NUTS

    sampler = MCMC(
        NUTS(_model(num_hidden, prior_precision**-0.5), max_tree_depth=chains.max_tree_depth),
        num_warmup=chains.warm_up,
        num_samples=chains.samples,
        num_chains=chains.chains,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=True,  # compiled once for all trials
    )
    outputs = []
    for r, inputs in enumerate(trials.train.inputs):
        sampler.run(jax.random.PRNGKey(r), inputs.numpy(), trials.train.targets[r].numpy())
        outputs.append(_outputs(sampler.get_samples(group_by_chain=True), trials.test.inputs[r]))
    of_chains = torch.stack(outputs)  # [R, chains, samples, m]
    halves = torch.stack([half.flatten(1, 2).var(1) for half in of_chains.tensor_split(2, 1)])
    return Reference(of_chains.flatten(1, 2).var(1), halves)


def _model(num_hidden: int, std: float) -> Callable[[Any, Any], None]:
    import jax.numpy as jnp
    import numpyro
    from numpyro.distributions import Gamma, Normal

    def model(inputs: Any, targets: Any) -> None:
        hidden = numpyro.sample("hidden", Normal(0, std).expand((num_hidden, inputs.shape[-1])).to_event(2))
        output = numpyro.sample("output", Normal(0, std).expand((num_hidden + 1,)).to_event(1))
        precision = numpyro.sample("precision", Gamma(*PUBLISHED_PRIOR))
        active = jnp.maximum(inputs @ hidden.T, 0)
        numpyro.sample("targets", Normal(active @ output[:-1] + output[-1], precision**-0.5), obs=targets)

    return model


def _outputs(samples: dict[str, Any], inputs: Tensor) -> Tensor:
    """Outputs of every sample, ``[chains, samples, m]``."""
    hidden, output = (torch.tensor(np.asarray(samples[name])) for name in ("hidden", "output"))
    return ((inputs @ hidden.mT).relu() @ output[..., :-1, None])[..., 0] + output[..., -1:]


def correlations(left: Tensor, right: Tensor) -> Tensor:
    """Pearson's correlation of each row of ``[R, m]`` with the same row of the other."""
    left, right = (values - values.mean(1, keepdim=True) for values in (left.double(), right.double()))
    return ((left * right).sum(1) / (left.norm(dim=1) * right.norm(dim=1))).float()


def load_trials(root: Path, name: str, count: int = 10) -> Splits:
    """Draw trials from a UCI set, standardised with their training rows; the queries are the test rows of the splits."""
    stored, generator = read_uci(root, name), torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(stored.targets), generator=generator) for _ in range(count)]
    return stack_splits(stored, [(o[:NUM_TRAIN], o[NUM_TRAIN : NUM_TRAIN + NUM_QUERY]) for o in orders])


def measure(name: str, trials: Splits, setting: Setting, chains: Chains) -> Iterator[Row]:
    """One row for NUTS compared with itself, and one per method."""
    start = time.process_time()
    truth = reference(trials, setting.num_hidden, setting.prior_precision, chains)
    for method in ("nuts", *LEARNERS):
        found, expected = truth.halves if method == "nuts" else (variances(method, trials, setting), truth.variances)
        now, budget = time.process_time(), asdict(chains) if method == "nuts" else {"epochs": setting.epochs}
        row = {"set": name, "method": method, **budget, "correlations": correlations(found, expected).tolist()}
        yield {**row, "seconds": now - start}
        start = now


def table(rows: list[Row]) -> str:
    """Format a Markdown table: one line per set, mean ± standard error over trials, published values in brackets."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = [["set", *(TITLES[method] for method in methods)], ["---", *["---:"] * len(methods)]]
    for name in SETS:
        found = {row["method"]: row["correlations"] for row in rows if row["set"] == name}
        if found:
            lines.append([name, *(_cell(name, method, found[method]) for method in methods)])
    lines.append(["mean", *(f"{value:.3f}" for value in average(rows).values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(name: str, method: str, values: list[float]) -> str:
    published = PUBLISHED["zhang2018_table4"].get(method, {}).get(name)
    return mean_and_error(values) + (f" ({with_error(*published, digits=3)})" if published else "")


def average(rows: list[Row]) -> dict[str, float]:
    """Mean correlation of every method over trials and sets."""
    methods = dict.fromkeys(row["method"] for row in rows)
    return {m: statistics.fmean(c for row in rows if row["method"] == m for c in row["correlations"]) for m in methods}


def promises(rows: list[Row]) -> Iterator[str]:
    """Yield one line per claim: a structured posterior is closer to NUTS, on average over sets and trials."""
    means = average(rows)
    for better, worse in (
        ("block_tridiagonal", "noisy_kfac"),
        ("noisy_kfac", "bbb"),
        ("noisy_kfac", "noisy_adam_fisher"),
    ):
        if {better, worse} <= means.keys():
            word = "kept" if means[better] >= means[worse] else "BROKEN"
            yield f"{word}: {TITLES[better]} {means[better]:.3f} ≥ {TITLES[worse]} {means[worse]:.3f}"


def main(arguments: list[str] | None = None) -> None:
    """Measure the missing sets, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the UCI sets")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=SETTING.epochs)
    parser.add_argument("--json", type=Path, help="written after each set; finished sets are skipped")
    for name, value in asdict(Chains()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help="of NUTS")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("numpyro") is None:
        parser.error("the reference needs numpyro: pip install 'lightning-bayes[bench]'")
    if options.chains < 2:
        parser.error(f"--chains {options.chains}: at least 2 are needed, to compare one half with the other")
    torch.set_num_threads(1)
    setting = replace(SETTING, epochs=options.epochs)
    chains = Chains(options.chains, options.warm_up, options.samples, options.max_tree_depth)
    rows: list[Row] = saved_rows(options.json)
    for name in options.sets:
        if not any(row["set"] == name for row in rows):
            rows += measure(name, load_trials(options.root, name, options.trials), setting, chains)
            save_json(options.json, {"numpyro": version("numpyro"), "setting": asdict(setting), "results": rows})
    print(table(rows))
    print("\n".join(f"- {line}" for line in promises(rows)))


if __name__ == "__main__":
    main()
