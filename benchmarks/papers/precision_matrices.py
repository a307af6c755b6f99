"""Normalised precision matrices of four Gaussian posteriors, Zhang et al. 2018, Figure 1.

    python -m benchmarks.papers.precision_matrices --root UCI [--epochs 100] [--plot FILE.png] [--json FILE]

A network with two hidden layers of 15 units on Boston housing (split 0), trained with noisy natural gradients and a full,
block-tridiagonal, matrix-variate or diagonal posterior. A precision P is drawn as |P_ij| / √(P_ii P_jj), ordered by layer.
The program prints the test log-likelihood of every posterior, and the Frobenius distance of its P from N F + δ I, where F is
the Fisher at its own mean with the exact expectation over labels, relative to the norm of that matrix. A full posterior
averages F over its weight samples and labels, so its distance is not zero. It takes two minutes of a core.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from benchmarks.papers.regression.data import Batch, Splits, epoch_of, load_splits
from benchmarks.papers.regression.learner import GammaPrecision
from benchmarks.provenance import save_json
from lightning_bayes import VOGN, BlockTridiagonalKFAC, NNGFull, NoisyKFAC
from lightning_bayes.likelihood import Gaussian
from lightning_bayes.posteriors import AbstractPosterior

METHODS: Final[dict[str, Callable[..., Any]]] = {
    "full": NNGFull,
    "block-tridiagonal": BlockTridiagonalKFAC,
    "matrix-variate": NoisyKFAC,
    "diagonal": lambda model, likelihood, **settings: VOGN(model, **settings),  # the empirical Fisher
}
WIDTH: Final = 15
LR, BETAS, PRIOR_PRECISION = 0.01, (0.9, 0.999), 1.0  # as in the regression experiments
BATCH, EVAL_SAMPLES = 10, 100


def network(num_inputs: int, width: int) -> nn.Sequential:
    """Two hidden layers of ReLUs."""
    return nn.Sequential(
        nn.Linear(num_inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


class Trained(NamedTuple):
    """A posterior after training, and its scores."""

    precision: Tensor
    distance: float
    log_likelihood: float


def plain(data: Batch) -> Batch:
    """Rows of the only split, without the column of ones."""
    return Batch(data.inputs[0, :, :-1], data.targets[0, :, None])


def train(method: str, splits: Splits, epochs: int, width: int = WIDTH) -> Trained:
    """Train with the published settings; the learning rate falls to a tenth in the second half of the epochs."""
    torch.manual_seed(0)
    generator, noise = torch.Generator().manual_seed(0), GammaPrecision(splits.num_data, torch.ones(1))
    model, likelihood = network(splits.train.inputs.shape[-1] - 1, width), Gaussian(1.0)
    settings = {
        "num_data": splits.num_data,
        "prior_precision": PRIOR_PRECISION,
        "init_precision": splits.num_data + 1.0,
    }
    optimizer = METHODS[method](model, likelihood=likelihood, lr=LR, betas=BETAS, seed=0, **settings)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = LR * (0.1 if epoch >= epochs / 2 else 1.0)
        for inputs, targets in map(plain, epoch_of(splits.train, BATCH, generator)):
            likelihood.std = float(noise.precision()) ** -0.5
            with optimizer.sampled_params():
                outputs = model(inputs)
                likelihood.loss(outputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            noise.observe((outputs.detach() - targets).T)
    posterior = optimizer.posterior()
    precision, exact = (
        dense_precision(posterior),
        exact_precision(model, plain(splits.train).inputs, float(noise.precision())),
    )
    distance = float(torch.linalg.matrix_norm(precision - exact) / torch.linalg.matrix_norm(exact))
    return Trained(precision, distance, log_likelihood(model, posterior, splits, noise))


def dense_precision(posterior: AbstractPosterior) -> Tensor:
    """(T Tᵀ)⁻¹ for the affine map θ = μ + T ε of any posterior, in double precision, ``[D, D]``."""
    sizes = [value.numel() for value in posterior.mean.values()]
    columns = []
    for unit in torch.eye(sum(sizes)):
        parts = unit.split(sizes)  # type: ignore[no-untyped-call]
        noise = {name: part.view_as(mean) for (name, mean), part in zip(posterior.mean.items(), parts, strict=True)}
        moved = posterior.transform(noise)
        columns.append(torch.cat([(moved[name] - mean).flatten() for name, mean in posterior.mean.items()]))
    root = torch.stack(columns, 1).double()
    return torch.linalg.inv(root @ root.mT)


def exact_precision(model: nn.Module, inputs: Tensor, noise_precision: float) -> Tensor:
    """N F + δ I = τ Σ_i ∇f_i ∇f_iᵀ + δ I at the model's weights, ``[D, D]``."""
    weights = {name: param.detach() for name, param in model.named_parameters()}

    def output(values: dict[str, Tensor], row: Tensor) -> Tensor:
        result: Tensor = functional_call(model, values, (row,))
        return result[0]

    gradients = vmap(jacrev(output), (None, 0))(weights, inputs)
    jacobian = torch.cat([part.flatten(1) for part in gradients.values()], 1).double()
    return noise_precision * jacobian.mT @ jacobian + PRIOR_PRECISION * torch.eye(jacobian.shape[1])


@torch.no_grad()
def log_likelihood(model: nn.Module, posterior: AbstractPosterior, splits: Splits, noise: GammaPrecision) -> float:
    """Test log-likelihood per row of the mixture over weight samples, in the units of the data."""
    test, generator = plain(splits.test), torch.Generator().manual_seed(1)
    draws = (posterior.sample(generator) for _ in range(EVAL_SAMPLES))
    residuals = torch.stack([(functional_call(model, draw, (test.inputs,)) - test.targets).T for draw in draws])
    density = noise.log_density(residuals)[:, 0].logsumexp(0) - math.log(EVAL_SAMPLES)
    return float(density.mean() - splits.target_std.log())


def normalised(precision: Tensor) -> Tensor:
    """|P_ij| / √(P_ii P_jj)."""
    scale = precision.diagonal().rsqrt()
    return (precision * scale[:, None] * scale).abs()


def draw(posteriors: dict[str, Trained], path: Path) -> None:
    """Draw the precision matrices with one colour scale."""
    figure = Figure(figsize=(3.3 * len(posteriors), 3.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(posteriors), squeeze=False)[0]
    for axes, (name, trained) in zip(panels, posteriors.items(), strict=True):
        shown = normalised(trained.precision).sqrt().numpy()
        image = axes.imshow(shown, cmap="magma", vmin=0, vmax=1, interpolation="none")
        axes.set(title=name, xticks=[], yticks=[])
    figure.colorbar(image, ax=list(panels), label="√ of the normalised precision")
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    """Train the four posteriors, print and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the UCI sets")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    splits = load_splits(options.root, "boston", 1)
    posteriors: dict[str, Trained] = {}
    for name in METHODS:
        trained = posteriors[name] = train(name, splits, options.epochs, options.width)
        print(f"{name:18} test log-likelihood {trained.log_likelihood:7.3f}", end="")
        print(f"   distance from the exact precision {trained.distance:.3f}", flush=True)
    if options.plot:
        draw(posteriors, options.plot)
    scores = {name: {"log_likelihood": t.log_likelihood, "distance": t.distance} for name, t in posteriors.items()}
    save_json(options.json, {"epochs": options.epochs, "results": scores})


if __name__ == "__main__":
    main()
