"""A sheet of the images with the most and the least certain predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.metrics.figure_style import BLUE, DPI, VERMILLION
from lightning_bayes.metrics.top_label import checked_probs

TILE = (1.15, 1.65)  # inches; width and height of an image with its caption
LONGEST_NAME = 12  # characters that fit after "true" above an image


def certainty_sheet(
    images: Tensor,
    targets: Tensor,
    probs: Tensor,
    class_names: Sequence[str] | None = None,
    rows: int = 2,
    columns: int = 8,
) -> Figure:
    """Draw the images with the most and the least certain predictions, with true class, predicted class and confidence.

    Wrong predictions have a thick red frame and are labelled WRONG. Images with values outside [0, 1], such as normalized
    images, are rescaled to [0, 1]. Each block shows at most half of the images, so no image is in both. Blocks with several
    rows show complete rows only.

    Args:
        images: Grey or colour images, ``[batch, 1 | 3, height, width]``.
        targets: Class indices, ``[batch]``.
        probs: Class probabilities, ``[batch, classes]``.
        class_names: A name per class, truncated to 12 characters; class indices by default.
        rows: Maximum number of rows of each of the two blocks.
        columns: Number of columns of each block.

    Returns:
        A figure with two subfigures, the most and the least certain images, each in the order of certainty. The title of
        the axes of an image is its caption.
    """
    _check(images, probs, class_names, rows, columns)
    confidence, labels = checked_probs(probs, targets).max(-1)
    count = min(rows * columns, len(images) // 2)
    if count > columns:
        count -= count % columns
    rows = math.ceil(count / columns)
    order = confidence.argsort(descending=True, stable=True)
    figure = Figure(figsize=(max(TILE[0] * columns, 2.0), 2 * TILE[1] * rows + 0.6), dpi=DPI, layout="constrained")
    blocks = figure.subfigures(2, 1, squeeze=False)[:, 0]
    selections = {"Most certain": order[:count], "Least certain": order.flip(0)[:count]}
    for block, (title, indices) in zip(blocks, selections.items(), strict=True):
        block.suptitle(title, fontsize=12, fontweight="bold")
        for axes, index in zip(_empty_tiles(block, rows, columns), indices.tolist(), strict=False):
            true, predicted = (_name(int(label), class_names) for label in (targets[index], labels[index]))
            _draw_image(axes, images[index])
            _caption(axes, true, predicted, float(confidence[index]), bool(labels[index] == targets[index]))
    return figure


def _check(images: Tensor, probs: Tensor, class_names: Sequence[str] | None, rows: int, columns: int) -> None:
    if images.ndim != 4 or images.shape[1] not in {1, 3} or len(images) != len(probs) or len(images) < 2:
        raise ShapeError(
            f"Expected at least two images [batch, 1 or 3, height, width] and as many rows of probs, got images "
            f"{list(images.shape)} and probs {list(probs.shape)}. Use unsqueeze(1) for grey images without channels."
        )
    if class_names is not None and len(class_names) != probs.shape[-1]:
        raise ShapeError(f"There are {len(class_names)} class names for {probs.shape[-1]} classes; pass one per class.")
    if rows < 1 or columns < 1:
        raise HyperparameterError(f"The sheet needs at least one row and one column, got rows={rows}, {columns=}.")


def _empty_tiles(block: SubFigure, rows: int, columns: int) -> list[Axes]:
    tiles = list(block.subplots(rows, columns, squeeze=False).flat)
    for axes in tiles:
        axes.set_axis_off()
    return tiles


def _draw_image(axes: Axes, image: Tensor) -> None:
    values = image.detach().cpu().float()
    low, high = float(values.min()), float(values.max())
    if low < 0 or high > 1:
        values = (values - low) / max(high - low, 1e-12)
    axes.imshow(values.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def _caption(axes: Axes, true: str, predicted: str, confidence: float, correct: bool) -> None:
    colour, width = (BLUE, 1.0) if correct else (VERMILLION, 3.5)
    axes.set_axis_on()
    axes.set(xticks=[], yticks=[])
    for side in axes.spines.values():
        side.set(edgecolor=colour, linewidth=width)
    text = f"true {true}\npred {predicted}\n{100 * confidence:.1f} %"
    axes.set_title(text if correct else f"{text}, WRONG", fontsize=9, color="black" if correct else VERMILLION)


def _name(label: int, class_names: Sequence[str] | None) -> str:
    name = str(label) if class_names is None else class_names[label]
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
