"""Headings of metrics, the format of their values, and the best of several values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

# Metric key without its stage → heading. The arrow points in the better direction.
HEADINGS: Final = {
    "cls/Acc": "accuracy ↑",
    "cls/NLL": "NLL ↓",
    "cls/Brier": "Brier ↓",
    "cal/ECE": "ECE ↓",
    "cal/aECE": "adaptive ECE ↓",
    "cal/cECE": "class-wise ECE ↓",
    "cal/MCE": "MCE ↓",
    "sc/AURC": "AURC ↓",
    "sc/Cov_5Risk": "coverage at 5 % risk ↑",
    "sc/Risk_80Cov": "risk at 80 % coverage ↓",
    "reject/threshold": "rejection threshold",
    "reject/coverage": "coverage after rejection ↑",
    "reject/error": "error after rejection ↓",
    "mis/AUROC": "error AUROC ↑",
    "mis/AUPR": "error AUPR ↑",
    "mis/FPR95": "error FPR95 ↓",
    "reg/RMSE": "RMSE ↓",
    "reg/NLL": "NLL per point ↓",
}
OOD_HEADINGS: Final = {"AUROC": "AUROC ↑", "AUPR": "AUPR ↑", "FPR95": "FPR95 ↓"}


def shown(value: float | None) -> str:
    """Format a value with four decimals; a missing value or NaN is a dash."""
    return "–" if value is None or math.isnan(value) else f"{value:.4f}"


def unique_best(values: Sequence[float | None], heading: str) -> int | None:
    """Find the best of several values.

    Args:
        values: One value per run.
        heading: A heading that ends with an arrow in the better direction.

    Returns:
        The index of the best value; None with fewer than two values, without an arrow, or if two values tie as displayed.

    Example:
        >>> unique_best([0.5, 0.25, None], "NLL ↓"), unique_best([0.5, 0.50001], "NLL ↓"), unique_best([0.5], "NLL ↓")
        (1, None, None)
    """
    displayed = {index: float(shown(value)) for index, value in enumerate(values) if shown(value) != "–"}
    if len(displayed) < 2 or heading[-1] not in "↑↓":
        return None
    best = max(displayed.values()) if heading.endswith("↑") else min(displayed.values())
    winners = [index for index, value in displayed.items() if value == best]
    return winners[0] if len(winners) == 1 else None
