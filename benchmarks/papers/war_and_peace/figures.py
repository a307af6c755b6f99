"""Learning curves, and generated text with characters shaded by uncertainty."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.line_figure import line_figure
from benchmarks.papers.war_and_peace.methods import METHODS
from benchmarks.papers.war_and_peace.report import Row
from lightning_bayes.metrics.figure_style import DPI, GREY, SERIES

COLUMNS = 60


def draw_curves(rows: list[Row], path: Path) -> None:
    """Plot the validation NLL over updates, one line per seed."""
    with line_figure(path, (5.5, 3.6), fontsize=8) as axes:
        colours = dict(zip(METHODS, (*SERIES, GREY, "black"), strict=False))
        seen: set[str] = set()
        for row in rows:
            steps, nats = zip(*row["curve"], strict=True)
            label = None if row["method"] in seen else METHODS[row["method"]].title
            seen.add(row["method"])
            axes.plot(steps, nats, color=colours[row["method"]], marker="o", markersize=3, label=label)
        axes.set(xlabel="updates", ylabel="validation NLL [nats per character]")


def draw_text(prompt: str, text: str, values: Tensor, path: Path) -> None:
    """Draw a text with the uncertainty of each character as background colour."""
    whole = (prompt + text).replace("\n", " ")
    colours = torch.cat([torch.zeros(len(prompt)), values])
    lines = [(whole[i : i + COLUMNS], colours[i : i + COLUMNS]) for i in range(0, len(whole), COLUMNS)]
    figure = Figure(figsize=(7.5, 0.6 + 0.24 * len(lines)), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    scale: Any = ScalarMappable(Normalize(0, float(values.max())), "Oranges")
    for down, (line, shades) in enumerate(lines):
        for along, (character, shade) in enumerate(zip(line, shades, strict=True)):
            axes.add_patch(_cell(along, down, scale.to_rgba(float(shade))))
            axes.text(along + 0.5, down + 0.5, character, family="monospace", size=8, ha="center", va="center")
    axes.set(xlim=(0, COLUMNS), ylim=(len(lines), 0))
    axes.axis("off")
    figure.colorbar(scale, ax=axes, label="mutual information [nats]", shrink=0.9)
    figure.savefig(path)


def _cell(along: int, down: int, colour: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((along, down), 1, 1, color=colour, linewidth=0)


def as_paragraph(text: str) -> str:
    """Wrap a text into lines."""
    return "\n".join(textwrap.wrap(text.replace("\n", " "), 100))
