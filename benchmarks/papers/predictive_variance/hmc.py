"""The reference: NUTS (numpyro, extra `bench`) with the same network, prior and Gamma prior of the noise precision.

w ~ N(0, 1/δ)    τ ~ Gamma(6, 6)    y ~ N(f(x, w), 1/τ)        f: one hidden layer of ReLUs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.papers.uci.data import Splits
from lightning_bayes.zoo.tasks.noise import PUBLISHED_PRIOR


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
