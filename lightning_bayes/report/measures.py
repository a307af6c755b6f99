"""The name of a measure, the format of its values, and the best of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

# Rest of the key → heading. The arrow is the better direction.
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
    "reject/threshold": "threshold of the rejector",
    "reject/coverage": "coverage of the rejector ↑",
    "reject/error": "error of its answers ↓",
    "mis/AUROC": "error AUROC ↑",
    "mis/AUPR": "error AUPR ↑",
    "mis/FPR95": "error FPR95 ↓",
    "reg/RMSE": "RMSE ↓",
    "reg/NLL": "NLL per point ↓",
}
OOD_HEADINGS: Final = {"AUROC": "AUROC ↑", "AUPR": "AUPR ↑", "FPR95": "FPR95 ↓"}


def shown(value: float | None) -> str:
    """A value as text.

    Args:
        value: The value; None if there is none.

    Returns:
        Four decimals, or a dash.
    """
    return "–" if value is None or value != value else f"{value:.4f}"


def unique_best(values: Sequence[float | None], heading: str) -> int | None:
    """The place of the best value, where it means something.

    Args:
        values: One for each run.
        heading: With an arrow in the better direction.

    Returns:
        The place; None with fewer than two values, without a direction, or where two share the best value as it is shown.

    Example:
        >>> unique_best([0.5, 0.25, None], "NLL ↓"), unique_best([0.5, 0.50001], "NLL ↓"), unique_best([0.5], "NLL ↓")
        (1, None, None)
    """
    known = {number: float(shown(value)) for number, value in enumerate(values) if shown(value) != "–"}
    if len(known) < 2 or heading[-1] not in "↑↓":
        return None
    best = max(known.values()) if heading.endswith("↑") else min(known.values())
    places = [number for number, value in known.items() if value == best]
    return places[0] if len(places) == 1 else None
