"""How far the default step ends from the optimum of its own objective, in nats.

    python -m benchmarks.defaults.objective [--updates 3000] [--json benchmarks/results/objective.json]

The objective, N E_q[f̄] + Σ_t τ_t KL(N(μ_t, Σ_t) ‖ N(μ_t, 1/δ_t)) + ½ δ ‖μ‖², is taken with the temperatures and priors at
which the run ended. δ is the stated prior's precision: none for the linear models, 1 for the MLP, whose means would have
their optimum at infinity without it. L-BFGS over means and variances, from where the run ended, gives the optimum: E_q is a
mean over antithetic draws there, and over others in the excess, so that a search that fits its draws gains nothing. *of the
mean* is what L-BFGS over the means alone gains. ``inf`` is a noise scale without effect, τ_t = 1. Losses are mean squares,
of a noise variance of ½, and the cross-entropy.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from benchmarks.provenance import provenance
from lightning_bayes.callbacks.summary import temperatures
from lightning_bayes.optim import VOGN, VON, MeanFieldOptimizer

DRAWS = 128  # and as many mirrored ones
UNBOUNDED = 1e6  # κ
METHODS: dict[str, Any] = {"vogn": VOGN, "von": VON}
Tensors = dict[str, Tensor]


class Task(NamedTuple):
    """What to fit, by full batches."""

    network: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]  # mean over examples
    prior: float = 0.0  # the stated precision; 0 where none is stated


class Excess(NamedTuple):
    """Nats above the optimum."""

    total: float
    of_mean: float


def tasks() -> dict[str, Task]:
    """Linear regression, logistic regression and a 2-50-1 MLP, of 60 examples."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    line = x @ torch.tensor([[2.0], [-1.0], [0.5]])
    noise = torch.randn(60, 1, generator=generator)
    wave = torch.sin(2 * x[:, :1]) + 0.5 * x[:, 1:2] + 0.3 * noise
    return {
        "linear": Task(lambda: nn.Linear(3, 1, bias=False), x, line + noise, F.mse_loss),
        "logistic": Task(
            lambda: nn.Linear(3, 1, bias=False),
            x,
            (line + torch.randn(60, 1, generator=generator) > 0).float(),
            F.binary_cross_entropy_with_logits,
        ),
        "mlp": Task(
            lambda: nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 1)), x[:, :2], wave / 0.3, F.mse_loss, 1.0
        ),
    }


def fit(task: Task, method: str, relative_noise: float, updates: int) -> tuple[nn.Module, MeanFieldOptimizer]:
    """The default step beside Adam, whose learning rate falls to zero by a cosine."""
    torch.manual_seed(0)
    model = task.network()
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    shared: dict[str, Any] = {"num_data": len(task.inputs), "relative_noise": relative_noise, "mc_samples": 2}
    prior = {"prior_on_mean": True, "prior_precision": task.prior} if task.prior else {"prior_on_mean": False}
    opt: MeanFieldOptimizer = METHODS[method](model, base=adam, **shared, **prior)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, updates)
    for _ in range(updates):
        for sample in range(2):
            with opt.sampled_params(sample):
                task.loss(model(task.inputs), task.targets).backward()
        opt.step()
        schedule.step()
    return model, opt


def excess(task: Task, model: nn.Module, optimizer: MeanFieldOptimizer) -> Excess:
    """What L-BFGS gains from the posterior on, over means and variances, and over means alone, on draws of their own."""
    posterior, taus = optimizer.posterior(), temperatures(optimizer)
    searched, fresh = (draws(posterior.mean, seed) for seed in (0, 1))

    def objective(values: Tensors, noise: Tensors) -> Tensor:
        samples = {n: values[f"{n}/mean"] + values[f"{n}/std"].exp() * noise[n] for n in noise}
        losses = vmap(lambda w: task.loss(functional_call(model, w, (task.inputs.double(),)), task.targets.double()))
        ratios = {n: posterior.prior_precision[n] * (2 * values[f"{n}/std"]).exp() for n in noise}
        kls = [float(taus[n]) * 0.5 * (ratio - 1 - ratio.log()).sum() for n, ratio in ratios.items()]
        of_means = [task.prior / 2 * values[f"{n}/mean"].square().sum() for n in noise]
        return len(task.inputs) * losses(samples).mean() + torch.stack(kls).sum() + torch.stack(of_means).sum()

    means = {f"{name}/mean": mean.double() for name, mean in posterior.mean.items()}
    stds = {f"{name}/std": std.double().log() for name, std in posterior.std.items()}
    by_means = minimise(lambda values: objective({**values, **stds}, searched), means)
    by_both = minimise(lambda values: objective(values, searched), {**means, **stds})
    start, of_mean, best = (
        float(objective(values, fresh)) for values in ({**means, **stds}, {**by_means, **stds}, by_both)
    )
    return Excess(start - best, start - of_mean)


def draws(like: Tensors, seed: int) -> Tensors:
    """Antithetic noise, independent between tensors."""
    generator = torch.Generator().manual_seed(seed)
    half = {n: torch.randn(DRAWS, *mean.shape, generator=generator, dtype=torch.float64) for n, mean in like.items()}
    return {n: torch.cat([noise, -noise]) for n, noise in half.items()}


def minimise(objective: Callable[[Tensors], Tensor], start: Tensors) -> Tensors:
    """Where L-BFGS ends from `start`."""
    values = {name: value.clone().requires_grad_() for name, value in start.items()}
    search = torch.optim.LBFGS(
        list(values.values()), max_iter=2000, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        search.zero_grad()
        loss = objective(values)
        loss.backward()
        return loss

    search.step(closure)
    return {name: value.detach() for name, value in values.items()}


def main() -> None:
    """Print the table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    print(f"{'task':10}{'method':8}{'κ':>6}{'log τ':>16}{'excess':>10}{'of the mean':>13}")
    for name, task in tasks().items():
        for method in METHODS:
            for scale in (0.1, 0.3, UNBOUNDED):
                model, opt = fit(task, method, scale, options.updates)
                logs = sorted(math.log(float(tau)) for tau in temperatures(opt).values())
                gap, kappa = excess(task, model, opt), "inf" if scale == UNBOUNDED else f"{scale:g}"
                found.append({"task": name, "method": method, "kappa": kappa, "log_tau": logs, **gap._asdict()})
                span = f"{logs[0]:.2f} to {logs[-1]:.2f}"
                print(f"{name:10}{method:8}{kappa:>6}{span:>16}{gap.total:>10.4f}{gap.of_mean:>13.4f}", flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({**provenance(), "updates": options.updates, "runs": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
