"""Correlation of predictive variances with those of Hamiltonian Monte Carlo, Zhang et al. 2018, Table 4.

    python -m benchmarks.papers.predictive_variance --root UCI [--sets boston yacht] [--epochs 20000] [--trials 10]
        [--samples 2000] [--json FILE]

In each trial a network with 10 hidden units trains on 20 rows and predicts the variance at 100 others. The correlation with
the variance of NUTS over these rows is averaged over 10 trials. NUTS is numpyro's, in the extra `bench`; the agreement
between two halves of its chains shows how exact it is. JSON is written after each set; finished sets are skipped.
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

from benchmarks.over_seeds import standard_error
from benchmarks.papers import PUBLISHED
from benchmarks.papers.regression.data import Setting, Splits, stack_splits
from benchmarks.papers.regression.learner import Learner, Problem
from benchmarks.papers.regression.mean_field import ALGORITHMS, MeanFieldLearner
from benchmarks.papers.regression.structured import BlockTridiagonalLearner, NoisyKFACLearner
from benchmarks.papers.uci import METHODS, SETS
from benchmarks.provenance import save_json, saved_rows
from lightning_bayes.zoo.data.uci import read_uci
from lightning_bayes.zoo.tasks.noise import PUBLISHED_PRIOR

SETTING: Final = Setting(  # Zhang et al. 2018, C.3; the other values as in C.1
    epochs=20_000,
    batch=(10, 10),
    mc_samples=(10, 10),
    lr=0.01,
    betas=(0.9, 0.99),
    decays=True,
    num_hidden=10,
    eval_samples=1000,
)
LEARNERS: Final[dict[str, Callable[[Problem], Learner]]] = {
    "bbb": lambda problem: MeanFieldLearner(problem, ALGORITHMS["bbb"]),
    "noisy_adam_fisher": lambda problem: MeanFieldLearner(problem, ALGORITHMS["noisy_adam_fisher"]),
    "noisy_kfac": NoisyKFACLearner,
    "block_tridiagonal": BlockTridiagonalLearner,
}
MEAN_FIELD: Final = ("bbb", "noisy_adam_fisher")


def variances(method: str, trials: Splits, setting: Setting) -> Tensor:
    """Train a method of `LEARNERS` on all trials at once, and return the variance of f at the queries, ``[R, m]``."""
    with torch.no_grad():
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
    """Predictive variances of NUTS for every trial."""

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
    trial_outputs = []
    for r in range(len(trials.target_std)):
        inputs, targets = (part[r].numpy() for part in trials.train)
        sampler.run(jax.random.PRNGKey(r), inputs, targets)
        trial_outputs.append(_outputs(sampler.get_samples(group_by_chain=True), trials.test.inputs[r].numpy()))
    outputs = torch.stack(trial_outputs)  # [R, chains, samples, m]
    halves = torch.stack([half.flatten(1, 2).var(1) for half in outputs.tensor_split(2, 1)])
    return Reference(outputs.flatten(1, 2).var(1), halves)


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


def _outputs(samples: dict[str, Any], inputs: np.ndarray[Any, Any]) -> Tensor:
    hidden, output = (torch.tensor(np.asarray(samples[name])) for name in ("hidden", "output"))
    active = (torch.as_tensor(inputs) @ hidden.mT).relu()  # [chains, samples, m, H]
    return (active @ output[..., :-1, None])[..., 0] + output[..., -1:]


Row = dict[str, Any]


def correlations(left: Tensor, right: Tensor) -> Tensor:
    """Pearson's correlation per row."""
    left, right = (values - values.mean(1, keepdim=True) for values in (left.double(), right.double()))
    return ((left * right).sum(1) / (left.norm(dim=1) * right.norm(dim=1))).float()


def title(method: str) -> str:
    """The title of a method in tables."""
    return "NUTS, half against half" if method == "nuts" else METHODS[method].title


def table(rows: list[Row]) -> str:
    """Format a Markdown table: one line per set, mean ± standard error over trials, published values in brackets."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = [["set", *map(title, methods)], ["---", *["---:"] * len(methods)]]
    for name in (name for name in SETS if any(row["set"] == name for row in rows)):
        by_method = {row["method"]: row["correlations"] for row in rows if row["set"] == name}
        lines.append([name, *(_cell(name, method, by_method.get(method)) for method in methods)])
    means = average(rows)
    lines.append(["mean", *(f"{means[method]:.3f}" for method in methods)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(name: str, method: str, values: list[float] | None) -> str:
    if values is None:
        return "–"
    text = f"{statistics.fmean(values):.3f}"
    if len(values) > 1:
        text += f" ± {standard_error(values):.3f}"
    if method in PUBLISHED["zhang2018_table4"]:
        mean, error = PUBLISHED["zhang2018_table4"][method][name]
        text += f" ({mean:.3f} ± {error:.3f})"
    return text


def average(rows: list[Row]) -> dict[str, float]:
    """Mean correlation of every method over trials and sets."""
    methods = dict.fromkeys(row["method"] for row in rows)
    return {m: statistics.fmean(c for row in rows if row["method"] == m for c in row["correlations"]) for m in methods}


def promises(rows: list[Row]) -> Iterator[str]:
    """Yield one line per claim: a structured posterior is closer to NUTS, on average over sets and trials."""
    means = average(rows)
    if means.keys() >= LEARNERS.keys():
        chain, kfac = means["block_tridiagonal"], means["noisy_kfac"]
        yield f"{_verdict(chain >= kfac)}: block-tridiagonal {chain:.3f} ≥ Noisy K-FAC {kfac:.3f}"
        for method in MEAN_FIELD:
            yield f"{_verdict(kfac > means[method])}: Noisy K-FAC {kfac:.3f} > {title(method)} {means[method]:.3f}"


def _verdict(holds: bool) -> str:
    return "kept" if holds else "BROKEN"


NUM_TRAIN: Final = 20
NUM_QUERY: Final = 100


def load_trials(root: Path, name: str, count: int = 10) -> Splits:
    """Draw trials from a UCI set, standardised with their training rows; the queries are the test rows of the splits."""
    stored, generator = read_uci(root, name), torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(stored.targets), generator=generator) for _ in range(count)]
    return stack_splits(stored, [(o[:NUM_TRAIN], o[NUM_TRAIN : NUM_TRAIN + NUM_QUERY]) for o in orders])


def measure(name: str, trials: Splits, setting: Setting, chains: Chains) -> list[Row]:
    """Sample and train on one set; one row for NUTS compared with itself, and one per method."""
    start = time.perf_counter()
    truth = reference(trials, setting.num_hidden, setting.prior_precision, chains)
    rows: list[Row] = []

    def record(method: str, variance: torch.Tensor, expected: torch.Tensor) -> None:
        nonlocal start
        values, now = correlations(variance, expected), time.perf_counter()
        budget = asdict(chains) if method == "nuts" else {"epochs": setting.epochs}
        measured = {"seconds": now - start, "correlations": values.tolist()}
        rows.append({"set": name, "method": method, **budget, **measured})
        print(f"{name}, {title(method)}: {values.mean():.3f}, {now - start:.0f} s", flush=True)
        start = now

    record("nuts", *truth.halves)
    for method in LEARNERS:
        record(method, variances(method, trials, setting), truth.variances)
    return rows


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the UCI sets")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=SETTING.epochs)
    parser.add_argument("--warm-up", type=int, default=Chains.warm_up, help="discarded steps per chain")
    parser.add_argument("--samples", type=int, default=Chains.samples, help="samples per chain")
    parser.add_argument("--chains", type=int, default=Chains.chains)
    parser.add_argument("--json", type=Path, help="written after each set; finished sets are skipped")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Measure the missing sets, and print the table."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("numpyro") is None:
        parser.error("the reference needs numpyro: pip install 'lightning-bayes[bench]'")
    if options.chains < 2:
        parser.error(f"--chains {options.chains}: at least 2 are needed, to compare one half with the other")
    torch.set_num_threads(1)
    setting = replace(SETTING, epochs=options.epochs)
    chains = Chains(options.chains, options.warm_up, options.samples)
    rows: list[Row] = saved_rows(options.json)
    for name in options.sets:
        if not any(row["set"] == name for row in rows):
            rows += measure(name, load_trials(options.root, name, options.trials), setting, chains)
            save_json(options.json, {"numpyro": version("numpyro"), "setting": asdict(setting), "results": rows})
    print(table(rows))
    print("\n".join(f"- {line}" for line in promises(rows)))


if __name__ == "__main__":
    main()
