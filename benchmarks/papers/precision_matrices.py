"""Normalised precision matrices of four Gaussian posteriors, Zhang et al. 2018, Fig. 1 (https://arxiv.org/abs/1712.02390).

    python -m benchmarks.papers.precision_matrices --root UCI [--epochs 100] [--plot FILE.png] [--json FILE]

A network with two hidden layers of 15 units on Boston housing (split 0), trained with noisy natural gradients and a full,
block-tridiagonal, matrix-variate or diagonal posterior. A precision P is drawn as |P_ij| / √(P_ii P_jj), with the weights
ordered by layer and, within a layer, by row. The program prints the test log-likelihood of every posterior, and the
Frobenius distance of its full P from the full curvature at its own mean, relative to the norm of that curvature.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor

from benchmarks.papers.regression.data import Batch, Splits, epoch_of, load_splits
from benchmarks.papers.regression.learner import GammaPrecision
from benchmarks.provenance import save_json
from lightning_bayes.linalg import KroneckerProduct, cholesky, pi_damped
from lightning_bayes.optim.dense.block_tridiagonal import ChainCurvature, damped_inverse

WIDTHS = (15, 15)
LR, BETAS, PRIOR_PRECISION = 0.01, (0.9, 0.999), 1.0  # as in the regression experiments
EVAL_SAMPLES = 100

Matrices = list[Tensor]


class Pass(NamedTuple):
    """A forward and backward pass through all layers."""

    outputs: Tensor
    inputs: Matrices
    deltas: Matrices

    def jacobian(self) -> Tensor:
        """∂f/∂w per example, ``[B, D]``."""
        parts = zip(self.deltas, self.inputs, strict=True)
        return torch.cat([(delta[:, :, None] * x[:, None]).flatten(1) for delta, x in parts], 1)


def run(weights: Matrices, inputs: Tensor) -> Pass:
    """Run a ReLU network with weights ``[out, in + 1]`` on inputs ``[B, in + 1]``, forward and backward."""
    layer_inputs = [inputs]
    for matrix in weights[:-1]:
        layer_inputs.append(torch.nn.functional.pad((layer_inputs[-1] @ matrix.mT).relu(), (0, 1), value=1.0))
    deltas = [torch.ones(len(inputs), 1)]
    for matrix, x in zip(weights[:0:-1], layer_inputs[:0:-1], strict=True):
        deltas.append((deltas[-1] @ matrix[:, :-1]) * (x[:, :-1] > 0))
    return Pass((layer_inputs[-1] @ weights[-1].mT)[:, 0], layer_inputs, deltas[::-1])


class Curvature(NamedTuple):
    """The Fisher of the mean negative log-likelihood, as needed for all four structures."""

    dense: Tensor
    blocks: list[KroneckerProduct]
    links: list[KroneckerProduct]


def fisher(network_pass: Pass, precision: float) -> Curvature:
    """The Fisher with the exact expectation over labels: τ times the second moments of ∂f."""
    jacobian, count = network_pass.jacobian(), len(network_pass.outputs)
    inputs, deltas = network_pass.inputs, network_pass.deltas

    def product(i: int, j: int) -> KroneckerProduct:
        return KroneckerProduct(precision * deltas[i].mT @ deltas[j] / count, inputs[i].mT @ inputs[j] / count)

    layers = range(len(inputs))
    return Curvature(
        precision * jacobian.mT @ jacobian / count,
        [product(i, i) for i in layers],
        [product(i, i + 1) for i in layers[:-1]],
    )


def identities(shapes: list[tuple[int, int]]) -> Curvature:
    """The initial curvature of the authors' code: noise of standard deviation 1/√N, no correlation between layers."""
    blocks = [KroneckerProduct(torch.eye(rows), torch.eye(side)) for rows, side in shapes]
    links = [KroneckerProduct(torch.zeros(a, c), torch.zeros(b, d)) for (a, b), (c, d) in pairwise(shapes)]
    return Curvature(torch.eye(sum(rows * side for rows, side in shapes)), blocks, links)


def averaged(old: Curvature, new: Curvature) -> Curvature:
    """The running average with β₂."""

    def mix(olds: list[KroneckerProduct], news: list[KroneckerProduct]) -> list[KroneckerProduct]:
        return [
            KroneckerProduct(*(a.lerp(b, 1 - BETAS[1]) for a, b in zip(*pair, strict=True)))
            for pair in zip(olds, news, strict=True)
        ]

    dense = old.dense.lerp(new.dense, 1 - BETAS[1])
    return Curvature(dense, mix(old.blocks, new.blocks), mix(old.links, new.links))


def full(curvature: Curvature, prior: float) -> Tensor:
    """F + δ̃ I."""
    return curvature.dense + prior * torch.eye(len(curvature.dense))


def diagonal(curvature: Curvature, prior: float) -> Tensor:
    """The diagonal of F + δ̃ I."""
    return torch.diag(full(curvature, prior).diagonal())


def matrix_variate(curvature: Curvature, prior: float) -> Tensor:
    """π-damped S ⊗ A of every layer."""
    return torch.block_diag(*(pi_damped(block, prior).dense() for block in curvature.blocks))


def block_tridiagonal(curvature: Curvature, prior: float) -> Tensor:
    """The matrix whose inverse is block-tridiagonal, from the covariance of its samples."""
    inverse = damped_inverse(ChainCurvature(tuple(curvature.blocks), tuple(curvature.links)), prior)
    shapes = [(len(block.left), len(block.right)) for block in curvature.blocks]
    eye = torch.eye(len(curvature.dense))
    columns = torch.split(eye, [rows * side for rows, side in shapes], 1)
    noise = [part.unflatten(1, shape) for part, shape in zip(columns, shapes, strict=True)]
    root = torch.cat([part.flatten(1) for part in inverse.root(noise)], 1)  # row k is T e_k
    return torch.cholesky_inverse(cholesky(root.mT @ root, "block-tridiagonal covariance"))


STRUCTURES: dict[str, Callable[[Curvature, float], Tensor]] = {
    "full": full,
    "block-tridiagonal": block_tridiagonal,
    "matrix-variate": matrix_variate,
    "diagonal": diagonal,
}


class Trained(NamedTuple):
    """One posterior after training."""

    precision: Tensor
    curvature_error: float
    log_likelihood: float


class Trainer:
    """Noisy natural gradient with one structure of the precision."""

    def __init__(
        self, splits: Splits, structure: Callable[[Curvature, float], Tensor], inverse_interval: int = 10
    ) -> None:
        self.splits, self.structure, self.interval = splits, structure, inverse_interval
        self.generator = Generator().manual_seed(0)
        self.noise = GammaPrecision(splits.num_data, torch.ones(1))
        self.prior = PRIOR_PRECISION / splits.num_data
        sides = [splits.train.inputs.shape[-1], *(width + 1 for width in WIDTHS)]
        self.shapes = list(zip([*WIDTHS, 1], sides, strict=True))
        first = [(2 * torch.rand(s, generator=self.generator) - 1) * (s[1] - 1) ** -0.5 for s in self.shapes]
        self.mean = torch.cat([matrix.flatten() for matrix in first])
        self.momentum = torch.zeros_like(self.mean)
        self.curvature = identities(self.shapes)
        self._invert()

    def train(self, epochs: int, batch: int = 10) -> Trained:
        """Train with the published settings; the learning rate falls to a tenth in the second half of the epochs."""
        step = 0
        for epoch in range(epochs):
            lr = LR * (0.1 if epoch >= epochs / 2 else 1.0)
            for rows in epoch_of(self.splits.train, batch, self.generator):
                step += 1
                self._step(rows, lr, step)
        self._invert()
        precision, truth = self.precision, full(self.curvature, self.prior)
        error = float(torch.linalg.matrix_norm(precision - truth) / torch.linalg.matrix_norm(truth))
        return Trained(precision * self.splits.num_data, error, self._log_likelihood())

    def _step(self, rows: Batch, lr: float, step: int) -> None:
        network_pass = run(self._draw(), rows.inputs[0])
        residuals = network_pass.outputs - rows.targets[0]
        tau = float(self.noise.precision())
        self.noise.observe(residuals[None])
        gradient = tau * (residuals[:, None] * network_pass.jacobian()).mean(0) + self.prior * self.mean
        self.momentum = self.momentum.lerp(gradient, 1 - BETAS[0])
        self.curvature = averaged(self.curvature, fisher(network_pass, tau))
        if step % self.interval == 0:
            self._invert()
        move = torch.cholesky_solve((self.momentum / (1 - BETAS[0] ** step))[:, None], self.factor)[:, 0]
        self.mean = self.mean - lr * move

    def _invert(self) -> None:
        self.precision = self.structure(self.curvature, self.prior)
        self.factor = cholesky(self.precision, "precision")

    def _draw(self) -> Matrices:
        noise = torch.randn(len(self.mean), 1, generator=self.generator) / math.sqrt(self.splits.num_data)
        flat = self.mean + torch.linalg.solve_triangular(self.factor.mT, noise, upper=True)[:, 0]
        parts = torch.split(flat, [rows * side for rows, side in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def _log_likelihood(self) -> float:
        test = self.splits.test
        residuals = torch.stack([run(self._draw(), test.inputs[0]).outputs for _ in range(EVAL_SAMPLES)]) - test.targets
        density = self.noise.log_density(residuals[:, None])[:, 0].logsumexp(0) - math.log(EVAL_SAMPLES)
        return float(density.mean() - self.splits.target_std.log())


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
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    splits = load_splits(options.root, "boston", 1)
    posteriors: dict[str, Trained] = {}
    for name, structure in STRUCTURES.items():
        with torch.no_grad():
            trained = posteriors[name] = Trainer(splits, structure).train(options.epochs)
        print(f"{name:18} test log-likelihood {trained.log_likelihood:7.3f}", end="")
        print(f"   distance from the full precision {trained.curvature_error:.3f}", flush=True)
    if options.plot:
        draw(posteriors, options.plot)
    scores = {
        name: {"log_likelihood": t.log_likelihood, "distance": t.curvature_error} for name, t in posteriors.items()
    }
    save_json(options.json, {"epochs": options.epochs, "results": scores})


if __name__ == "__main__":
    main()
