"""The reference: NUTS (numpyro, extra `bench`) with the same network, noise and prior.

w ~ N(0, 1/δ)    y ~ N(f(x, w), σ²)        f: one hidden layer of tanh units
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gap_regression.data import NOISE_STD, Band, Points


def nuts(
    points: Points, inputs: Tensor, hidden: int, prior_precision: float, chains: int, steps: int
) -> tuple[Band, list[Band]]:
    """Sample the posterior.

    Args:
        points: The data.
        inputs: Inputs of the predictions, ``[m, 1]``.
        hidden: Number of hidden units.
        prior_precision: δ.
        chains: Number of chains, from random starts.
        steps: Warm-up steps per chain, and samples per chain.

    Returns:
        The band of all chains, and the bands of two halves of the chains, whose difference is Monte-Carlo error.
    """
    import jax
    import jax.numpy as jnp
    import numpyro
    from numpyro.distributions import Normal
    from numpyro.infer import MCMC, NUTS

    def network(weights: dict[str, Any], x: Any) -> Any:
        active = jnp.tanh(x @ weights["in"] + weights["in_bias"])
        return active @ weights["out"] + weights["out_bias"]

    def model(x: Any, y: Any) -> None:
        std = prior_precision**-0.5
        shapes = {"in": (1, hidden), "in_bias": (hidden,), "out": (hidden, 1), "out_bias": (1,)}
        weights = {name: numpyro.sample(name, Normal(0, std).expand(shape)) for name, shape in shapes.items()}
        numpyro.sample("y", Normal(network(weights, x), NOISE_STD), obs=y)

    sampler = MCMC(
        NUTS(model, max_tree_depth=9),
        num_warmup=steps,
        num_samples=steps,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    sampler.run(jax.random.PRNGKey(0), points.inputs.numpy(), points.targets.numpy())
    samples = sampler.get_samples(group_by_chain=True)
    predict = jax.vmap(jax.vmap(lambda weights: network(weights, inputs.numpy())[:, 0]))
    outputs = torch.tensor(np.asarray(predict({name: samples[name] for name in ("in", "in_bias", "out", "out_bias")})))
    return _band(outputs), [_band(half) for half in outputs.tensor_split(2)]


def _band(outputs: Tensor) -> Band:
    draws = outputs.flatten(0, 1).double()
    return Band(draws.mean(0).tolist(), draws.std(0).tolist())
