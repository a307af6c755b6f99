"""The classic picture: predictive bands of four posteriors over data with a gap.

    python -m benchmarks.gap_regression [--plot FILE.png] [--json FILE] [--from FILE]

A network of 50 tanh units trains on 80 points in two clusters; 40 more points are for `PosteriorScale`. For every method the
program prints the epistemic standard deviation of f on the data and in the middle half of the gap, and their ratio. NUTS
(numpyro, extra `bench`) samples the posterior of the same network, noise and prior; the ratios of the two halves of its
chains are printed too. ``--from`` prints and draws saved results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.gap_regression.data import Band, draw_points, grid, in_gap, on_data
from benchmarks.gap_regression.figure import draw
from benchmarks.gap_regression.methods import HIDDEN, METHODS, PRIOR_PRECISION, train
from benchmarks.gap_regression.nuts import nuts
from benchmarks.provenance import provenance
from benchmarks.quiet import quiet

NUM_TRAIN, NUM_VALIDATION = 80, 40
REFERENCE = "NUTS"


def table(bands: Mapping[str, Band]) -> str:
    """Format a Markdown table of the spreads of all methods.

    Args:
        bands: Bands by title.

    Returns:
        The table.

    Example:
        >>> print(table({"flat": Band([0.0] * 193, [0.1] * 193)}).splitlines()[-1])
        | flat | 0.100 | 0.100 | 1.0 |
    """
    lines = ["| posterior | std of f on the data | in the gap | ratio |", "| --- | ---: | ---: | ---: |"]
    for title, band in bands.items():
        near, far = band.spread(on_data(grid())), band.spread(in_gap(grid()))
        lines.append(f"| {title} | {near:.3f} | {far:.3f} | {far / near:.1f} |")
    return "\n".join(lines)


def measure(epochs: int, seed: int, chains: int, steps: int) -> tuple[dict[str, Band], list[Band]]:
    """Train all methods, and sample the reference.

    Args:
        epochs: Passes over the training data.
        seed: Seed of data, network and batch order.
        chains: Number of chains of NUTS; 0 skips it.
        steps: Warm-up steps per chain, and samples per chain.

    Returns:
        Bands by title, and the bands of two halves of the reference's chains.
    """
    points, validation = draw_points(NUM_TRAIN, seed), draw_points(NUM_VALIDATION, seed + 1000)
    bands: dict[str, Band] = {}
    with quiet():
        for method in METHODS:
            bands[method.title] = train(method, points, validation, grid(), epochs, seed)
            print(f"{method.title}: {method.lines}", flush=True)
    halves: list[Band] = []
    if chains:
        bands[REFERENCE], halves = nuts(points, grid(), HIDDEN, PRIOR_PRECISION, chains, steps)
    return bands, halves


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, draw and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chains", type=int, default=4, help="chains of NUTS; 0 skips it")
    parser.add_argument("--steps", type=int, default=200, help="warm-up steps per chain, and samples per chain")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--from", dest="saved", type=Path, help="saved results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.saved:
        saved = json.loads(options.saved.read_text("utf-8"))
    else:
        bands, halves = measure(options.epochs, options.seed, options.chains, options.steps)
        saved = {**provenance(), **{key: getattr(options, key) for key in ("epochs", "seed", "chains", "steps")}}
        saved |= {"bands": {title: band._asdict() for title, band in bands.items()}}
        saved |= {"halves": [band._asdict() for band in halves]}
    bands = {title: Band(**band) for title, band in saved["bands"].items()}
    print(table(bands))
    for title, band in bands.items():
        if band.scale is not None:
            print(f"{title}: c = {band.scale:.3g}")
    halves = [Band(**band) for band in saved["halves"]]
    ratios = [half.spread(in_gap(grid())) / half.spread(on_data(grid())) for half in halves]
    print(f"ratio of each half of the chains: {', '.join(f'{ratio:.1f}' for ratio in ratios)}" if ratios else "no NUTS")
    if options.plot:
        draw(bands, draw_points(NUM_TRAIN, saved["seed"]), options.plot)
    if options.json:
        options.json.write_text(json.dumps(saved) + "\n", "utf-8")


if __name__ == "__main__":
    main()
