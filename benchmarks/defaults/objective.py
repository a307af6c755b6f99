"""Distance of the default step's result from the optimum of its own objective, in nats.

    python -m benchmarks.defaults.objective [--updates 3000] [--json benchmarks/results/objective.json]

The objective is N E_q[f̄] + Σ_t τ_t KL(N(μ_t, Σ_t) ‖ N(μ_t, 1/δ_t)) + ½ δ ‖μ‖², at the temperatures and priors of the last
update. δ is the explicit prior precision: 0 for the linear models, 1 for the MLP, whose optimal means would be infinite
without it. L-BFGS over means and variances, started from the result, gives the optimum. It estimates E_q with antithetic
draws; the excess is computed with other draws, so that overfitting the draws gains nothing. *of the mean* is the gain of
L-BFGS over the means alone. κ = ``inf`` is a noise scale without effect, τ_t = 1. The losses are squared errors, with a
noise variance of ½, and cross-entropy.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from benchmarks.provenance import save_json
from lightning_bayes.callbacks.summary import temperatures
from lightning_bayes.optim import VOGN, VON, VariationalOptimizer

DRAWS = 128  # of each antithetic half
UNBOUNDED = 1e6  # κ
METHODS: dict[str, Any] = {"vogn": VOGN, "von": VON}
Tensors = dict[str, Tensor]


class Task(NamedTuple):
    """A model and its data, trained with full batches."""

    network: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]  # mean over examples
    prior: float = 0.0  # precision of the explicit prior; 0 for none


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


def fit(task: Task, method: str, relative_noise: float, updates: int) -> tuple[nn.Module, VariationalOptimizer]:
    """Train with the default step on top of Adam with a cosine learning rate."""
    torch.manual_seed(0)
    model = task.network()
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    shared: dict[str, Any] = {"num_data": len(task.inputs), "relative_noise": relative_noise, "mc_samples": 2}
    prior = {"prior_on_mean": True, "prior_precision": task.prior} if task.prior else {"prior_on_mean": False}
    opt: VariationalOptimizer = METHODS[method](model, base=adam, **shared, **prior)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, updates)
    for _ in range(updates):
        for sample in range(2):
            with opt.sampled_params(sample):
                task.loss(model(task.inputs), task.targets).backward()
        opt.step()
        schedule.step()
    return model, opt


def excess(task: Task, model: nn.Module, optimizer: VariationalOptimizer) -> Excess:
    """The gain of L-BFGS, started from the posterior: over means and variances, and over means alone."""
    posterior, taus = optimizer.posterior(), temperatures(optimizer)
    search_noise, fresh_noise = (draws(posterior.mean, seed) for seed in (0, 1))

    def objective(values: Tensors, noise: Tensors) -> Tensor:
        samples = {n: values[f"{n}/mean"] + values[f"{n}/std"].exp() * noise[n] for n in noise}
        losses = vmap(lambda w: task.loss(functional_call(model, w, (task.inputs.double(),)), task.targets.double()))
        ratios = {n: posterior.prior_precision[n] * (2 * values[f"{n}/std"]).exp() for n in noise}
        kls = [float(taus[n]) * 0.5 * (ratio - 1 - ratio.log()).sum() for n, ratio in ratios.items()]
        priors = [task.prior / 2 * values[f"{n}/mean"].square().sum() for n in noise]
        return len(task.inputs) * losses(samples).mean() + torch.stack(kls).sum() + torch.stack(priors).sum()

    means = {f"{name}/mean": mean.double() for name, mean in posterior.mean.items()}
    stds = {f"{name}/std": std.double().log() for name, std in posterior.std.items()}
    by_means = minimise(lambda values: objective({**values, **stds}, search_noise), means)
    by_both = minimise(lambda values: objective(values, search_noise), {**means, **stds})
    candidates = ({**means, **stds}, {**by_means, **stds}, by_both)
    start, best_mean, best = (float(objective(values, fresh_noise)) for values in candidates)
    return Excess(start - best, start - best_mean)


def draws(like: Tensors, seed: int) -> Tensors:
    """Antithetic noise, independent between tensors."""
    generator = torch.Generator().manual_seed(seed)
    half = {n: torch.randn(DRAWS, *mean.shape, generator=generator, dtype=torch.float64) for n, mean in like.items()}
    return {n: torch.cat([noise, -noise]) for n, noise in half.items()}


def minimise(objective: Callable[[Tensors], Tensor], start: Tensors) -> Tensors:
    """Minimise with L-BFGS from `start`."""
    values = {name: value.clone().requires_grad_() for name, value in start.items()}
    lbfgs = torch.optim.LBFGS(
        list(values.values()), max_iter=2000, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = objective(values)
        loss.backward()
        return loss

    lbfgs.step(closure)
    return {name: value.detach() for name, value in values.items()}


def main() -> None:
    """Print the table, and write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = []
    print(f"{'task':10}{'method':8}{'κ':>6}{'log τ':>16}{'excess':>10}{'of the mean':>13}")
    for name, task in tasks().items():
        for method in METHODS:
            for scale in (0.1, 0.3, UNBOUNDED):
                model, opt = fit(task, method, scale, options.updates)
                logs = sorted(math.log(float(tau)) for tau in temperatures(opt).values())
                gap, kappa = excess(task, model, opt), "inf" if scale == UNBOUNDED else f"{scale:g}"
                runs.append({"task": name, "method": method, "kappa": kappa, "log_tau": logs, **gap._asdict()})
                span = f"{logs[0]:.2f} to {logs[-1]:.2f}"
                print(f"{name:10}{method:8}{kappa:>6}{span:>16}{gap.total:>10.4f}{gap.of_mean:>13.4f}", flush=True)
    save_json(options.json, {"updates": options.updates, "runs": runs})


if __name__ == "__main__":
    main()
