"""Avoiding local minima: Khan et al. 2018, App. L, Fig. 7.

    python -m benchmarks.papers.local_minima [--starts 200] [--updates 4000] [--out FIGURE.png] [--json FILE]

The landscape is F = 1 - h with h(x, y) = exp{-(x sin 20y + y sin 20x)² - (x cos 10y - y sin 10x)²} (Robert & Casella 2005,
Fig. 5.2). It is 0 along the line x = 0, near 0 in many narrow valleys, and flat round the origin alone. Gradient descent and
AdaGrad are compared with the paper's "Vadam to VadaGrad", which is `optim.diagonal.vadagrad` with Vadam's momentum and a
temperature that falls from 1 (inference) to 0 (optimization), and with the same without noise, from random starts in
[-1, 1]². The figure shows four starts. The table has F where they end, and the mean of F under noise of standard deviation
0.1 there, which is small in the flat minimum only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.provenance import provenance
from lightning_bayes.metrics.figure_style import DPI, PANEL_WIDTH, SERIES
from lightning_bayes.optim.diagonal import vadagrad
from lightning_bayes.optim.diagonal.state import MeanFieldState

SHOWN = 4  # starts in the figure
WIDTH = 0.1  # standard deviation of the noise that tells a flat minimum from a narrow one
FLAT = 0.05  # mean of F under it, below which a minimum counts as flat


def landscape(points: Tensor) -> Tensor:
    """F of ``[..., 2]`` points.

    Args:
        points: (x, y).

    Returns:
        Values between 0 and 1, ``[...]``.

    Example:
        >>> landscape(torch.tensor([[0.0, 0.7], [0.0, -2.0]]))
        tensor([0., 0.])
    """
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
    """Positions of AdaGrad: VadaGrad, whose temperature is 0 throughout, without its noise."""
    return annealed(start, updates, lr, noise=0.0, momentum=0.0, hottest=0.0)


def annealed(
    start: Tensor, updates: int, lr: float = 0.05, noise: float = 1.0, momentum: float = 0.9, hottest: float = 1.0
) -> Iterator[Tensor]:
    """Means of Vadam annealed into VadaGrad, on the landscape as its own data set of one example.

    Args:
        start: ``[starts, 2]``.
        updates: Number of updates; the temperature is 0 in the second half of them.
        lr: α.
        noise: Factor of the noise.
        momentum: β₁.
        hottest: The first temperature.

    Yields:
        ``[starts, 2]`` after each update.
    """
    generator = torch.Generator().manual_seed(0)
    prior, precision = 1e-2, 10.0  # δ, and the precision that the search starts with
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
    """Run all methods from the same random starts.

    Args:
        starts: Number of starts.
        updates: Number of updates.

    Returns:
        Positions by method, ``[updates + 1, starts, 2]``.
    """
    start = 2 * torch.rand(starts, 2, generator=torch.Generator().manual_seed(1)) - 1
    return {name: torch.stack([start, *method(start, updates)]) for name, method in METHODS.items()}


def noisy_landscape(points: Tensor, samples: int = 200) -> Tensor:
    """Mean of F under Gaussian noise.

    Args:
        points: ``[starts, 2]``.
        samples: Number of draws, the same for all points.

    Returns:
        ``[starts]``.
    """
    noise = WIDTH * torch.randn(samples, 1, 2, generator=torch.Generator().manual_seed(2))
    return landscape(points + noise).mean(0)


def draw(found: dict[str, Tensor]) -> Figure:
    """The landscape, and the way of each method from the first starts.

    Args:
        found: From `tracks`.

    Returns:
        The figure, one panel for each method.
    """
    figure = Figure(figsize=(1.2 * PANEL_WIDTH * len(found), 1.4 * PANEL_WIDTH), dpi=DPI, layout="constrained")
    limit = 1.05 * float(max(1.0, *(way[:, :SHOWN].abs().max() for way in found.values())))
    axis = np.linspace(-limit, limit, 400)
    grid = torch.as_tensor(np.stack(np.meshgrid(axis, axis), -1))
    for axes, (name, way) in zip(figure.subplots(1, len(found), sharey=True), found.items(), strict=True):
        axes.contourf(axis, axis, landscape(grid).numpy(), levels=16, cmap="Greys", alpha=0.7)
        _draw_ways(axes, way)
        axes.set(title=name, xlabel="x", xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
    figure.axes[0].set_ylabel("y")
    return figure


def _draw_ways(axes: Axes, way: Tensor) -> None:
    for k, colour in zip(range(SHOWN), SERIES, strict=False):
        x, y = way[:, k].T.numpy()
        axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.6)
        axes.plot(x[0], y[0], "s", color=colour, markersize=5)
        axes.plot(x[-1], y[-1], "*", color=colour, markersize=11, markeredgecolor="black", markeredgewidth=0.5)


def summary(ends: Tensor) -> dict[str, float]:
    """Mean value, mean noisy value, and the share of ends in the flat minimum, of ``[starts, 2]`` ends."""
    noisy = noisy_landscape(ends)
    return {
        "value": float(landscape(ends).mean()),
        "noisy_value": float(noisy.mean()),
        "flat": float((noisy < FLAT).float().mean()),
    }


def main(arguments: list[str] | None = None) -> None:
    """Print how often each method reaches the global minimum; write the figure and JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--updates", type=int, default=4000)
    parser.add_argument("--out", type=Path, help="PNG file")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found = tracks(max(options.starts, SHOWN), options.updates)
    rows = {name: summary(way[-1]) for name, way in found.items()}
    print(f"{'':30}{'F':>8}{'noisy F':>10}{'in the flat minimum':>22}")
    for name, row in rows.items():
        print(f"{name:30}{row['value']:8.4f}{row['noisy_value']:10.4f}{row['flat']:22.0%}")
    if options.out:
        draw(found).savefig(options.out)
    if options.json:
        options.json.write_text(
            json.dumps({**provenance(), "updates": options.updates, "results": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
