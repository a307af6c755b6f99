"""Avoiding local minima: Khan et al. 2018, App. L, Fig. 7.

    python -m benchmarks.papers.local_minima [--starts 200] [--updates 4000] [--out FIGURE.png] [--json FILE]

The landscape is F = 1 - h with h(x, y) = exp{-(x sin 20y + y sin 20x)² - (x cos 10y - y sin 10x)²} (Robert & Casella 2005,
Fig. 5.2). It is 0 along the line x = 0 and near 0 in many narrow valleys, and it is flat only around the origin. From random
starts in [-1, 1]², gradient descent and AdaGrad are compared with the paper's "Vadam to VadaGrad", which is
`optim.diagonal.vadagrad` with Vadam's momentum and a temperature that falls from 1 (inference) to 0 (optimization), with and
without noise. The figure shows four starts. The table has F at the end points, and the mean of F under noise of standard
deviation 0.1, which is small only in the flat minimum.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.provenance import save_json
from lightning_bayes.metrics.figure_style import DPI, PANEL_WIDTH, SERIES
from lightning_bayes.optim.diagonal import vadagrad
from lightning_bayes.optim.diagonal.state import MeanFieldState

SHOWN = 4  # starts in the figure
WIDTH = 0.1  # standard deviation of the noise that separates flat from narrow minima
FLAT = 0.05  # a minimum is flat if the mean of F under this noise is smaller


def landscape(points: Tensor) -> Tensor:
    """The landscape F."""
    x, y = points.unbind(-1)
    first = x * torch.sin(20 * y) + y * torch.sin(20 * x)
    second = x * torch.cos(10 * y) - y * torch.sin(10 * x)
    return 1 - torch.exp(-first.square() - second.square())


_gradient: Callable[[Tensor], Tensor] = torch.func.grad(lambda points: landscape(points).sum())


def gradient_descent(start: Tensor, updates: int, lr: float = 1e-3) -> Iterator[Tensor]:
    """Positions of gradient descent from ``[starts, 2]``."""
    point = start
    for _ in range(updates):
        point = point - lr * _gradient(point)
        yield point


def adagrad(start: Tensor, updates: int, lr: float = 0.05) -> Iterator[Tensor]:
    """Positions of AdaGrad: VadaGrad at temperature 0, without noise."""
    return annealed(start, updates, lr, noise=0.0, momentum=0.0, hottest=0.0)


def annealed(
    start: Tensor, updates: int, lr: float = 0.05, noise: float = 1.0, momentum: float = 0.9, hottest: float = 1.0
) -> Iterator[Tensor]:
    """Means of Vadam annealed into VadaGrad. The landscape is the loss of a data set with one example."""
    generator = torch.Generator().manual_seed(0)
    prior, precision = 1e-2, 10.0  # δ, and the initial precision
    state = MeanFieldState(start, torch.full_like(start, precision - prior), torch.zeros_like(start))
    for t in range(updates):
        std = (state.curvature + prior).rsqrt()
        sample = state.mean + noise * std * torch.randn(start.shape, generator=generator)
        gradient = _gradient(sample)
        temperature = hottest * max(0.0, 1 - 2 * t / updates)
        state = vadagrad.update(
            state,
            gradient,
            gradient.square(),
            lr=lr,
            betas=(momentum, 0.9),
            prior=temperature * prior,
            full_prior=prior,
            step=t + 1,
            temperature=temperature,
        )
        yield state.mean


METHODS: dict[str, Callable[[Tensor, int], Iterator[Tensor]]] = {
    "gradient descent": gradient_descent,
    "AdaGrad": adagrad,
    "Vadam to VadaGrad": annealed,
    "the same without noise": partial(annealed, noise=0.0),
}


def tracks(starts: int, updates: int) -> dict[str, Tensor]:
    """Run all methods from the same random starts; returns positions by method, ``[updates + 1, starts, 2]``."""
    start = 2 * torch.rand(starts, 2, generator=torch.Generator().manual_seed(1)) - 1
    return {name: torch.stack([start, *method(start, updates)]) for name, method in METHODS.items()}


def noisy_landscape(points: Tensor, samples: int = 200) -> Tensor:
    """Mean of F under Gaussian noise for points ``[starts, 2]``, with the same draws for all points."""
    noise = WIDTH * torch.randn(samples, 1, 2, generator=torch.Generator().manual_seed(2))
    return landscape(points + noise).mean(0)


def draw(paths: dict[str, Tensor]) -> Figure:
    """Draw the landscape and the paths of `tracks` from the first starts, one panel per method."""
    figure = Figure(figsize=(1.2 * PANEL_WIDTH * len(paths), 1.4 * PANEL_WIDTH), dpi=DPI, layout="constrained")
    limit = 1.05 * float(max(1.0, *(path[:, :SHOWN].abs().max() for path in paths.values())))
    axis = np.linspace(-limit, limit, 400)
    grid = torch.as_tensor(np.stack(np.meshgrid(axis, axis), -1))
    for axes, (name, path) in zip(figure.subplots(1, len(paths), sharey=True), paths.items(), strict=True):
        axes.contourf(axis, axis, landscape(grid).numpy(), levels=16, cmap="Greys", alpha=0.7)
        _draw_paths(axes, path)
        axes.set(title=name, xlabel="x", xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
    figure.axes[0].set_ylabel("y")
    return figure


def _draw_paths(axes: Axes, path: Tensor) -> None:
    for k, colour in zip(range(SHOWN), SERIES, strict=False):
        x, y = path[:, k].T.numpy()
        axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.6)
        axes.plot(x[0], y[0], "s", color=colour, markersize=5)
        axes.plot(x[-1], y[-1], "*", color=colour, markersize=11, markeredgecolor="black", markeredgewidth=0.5)


def summary(ends: Tensor) -> dict[str, float]:
    """Mean F, mean noisy F, and the fraction of end points ``[starts, 2]`` in the flat minimum."""
    noisy = noisy_landscape(ends)
    return {
        "value": float(landscape(ends).mean()),
        "noisy_value": float(noisy.mean()),
        "flat": float((noisy < FLAT).float().mean()),
    }


def main(arguments: list[str] | None = None) -> None:
    """Print how often each method reaches the flat minimum; write the figure and JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--updates", type=int, default=4000)
    parser.add_argument("--out", type=Path, help="PNG file")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    paths = tracks(max(options.starts, SHOWN), options.updates)
    rows = {name: summary(path[-1]) for name, path in paths.items()}
    print(f"{'':30}{'F':>8}{'noisy F':>10}{'in the flat minimum':>22}")
    for name, row in rows.items():
        print(f"{name:30}{row['value']:8.4f}{row['noisy_value']:10.4f}{row['flat']:22.0%}")
    if options.out:
        draw(paths).savefig(options.out)
    save_json(options.json, {"updates": options.updates, "results": rows})


if __name__ == "__main__":
    main()
