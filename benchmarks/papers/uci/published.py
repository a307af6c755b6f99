"""Published results: RMSE and test log-likelihood, each with its standard error over the splits.

Zhang et al. 2018 (https://arxiv.org/abs/1712.02390), Table 1; Khan et al. 2018 (https://arxiv.org/abs/1806.04854), Table 1.
The log-likelihoods of Vadam and BBVI in the latter are joint over all test points, divided by their number, and so
pessimistic; those of MC-dropout are from Gal & Ghahramani, point by point. Zhang et al. predict a different target of naval.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Figure(NamedTuple):
    """A published mean and its standard error, of both scores."""

    rmse: tuple[float, float]
    log_likelihood: tuple[float, float]


SETS: Final = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "wine", "yacht")

_ZHANG: Final = {
    "bbb": (
        "3.171 0.149 5.678 0.087 0.565 0.018 0.080 0.001 0.000 0.000 4.023 0.036 0.643 0.012 1.174 0.086",
        "-2.602 0.031 -3.149 0.018 -1.500 0.006 1.111 0.007 6.143 0.032 -2.807 0.010 -0.977 0.017 -2.408 0.007",
    ),
    "noisy_adam": (
        "3.031 0.155 5.613 0.113 0.839 0.046 0.079 0.001 0.001 0.000 4.002 0.039 0.644 0.011 1.289 0.069",
        "-2.558 0.032 -3.145 0.023 -1.629 0.020 1.112 0.008 6.231 0.041 -2.803 0.010 -0.976 0.016 -2.412 0.006",
    ),
    "noisy_kfac": (
        "2.742 0.125 5.019 0.127 0.485 0.023 0.076 0.001 0.000 0.000 3.886 0.041 0.637 0.011 0.979 0.077",
        "-2.446 0.029 -3.039 0.025 -1.421 0.005 1.148 0.007 7.079 0.034 -2.776 0.011 -0.969 0.014 -2.316 0.006",
    ),
}
_KHAN: Final = {
    "mc_dropout": (
        "2.97 0.19 5.23 0.12 1.66 0.04 0.10 0.00 0.01 0.00 4.02 0.04 0.62 0.01 1.11 0.09",
        "-2.46 0.06 -3.04 0.02 -1.99 0.02 0.95 0.01 3.80 0.01 -2.80 0.01 -0.93 0.01 -1.55 0.03",
    ),
    "bbb": (
        "3.58 0.21 6.14 0.13 2.79 0.06 0.09 0.00 0.00 0.00 4.31 0.03 0.65 0.01 2.05 0.06",
        "-2.73 0.05 -3.24 0.02 -2.47 0.02 0.95 0.01 4.46 0.03 -2.88 0.01 -1.00 0.01 -2.41 0.02",
    ),
    "vadam": (
        "3.93 0.26 6.85 0.09 1.55 0.08 0.10 0.00 0.00 0.00 4.28 0.03 0.66 0.01 1.32 0.10",
        "-2.85 0.07 -3.39 0.02 -2.15 0.07 0.76 0.00 4.72 0.22 -2.88 0.01 -1.01 0.01 -1.70 0.03",
    ),
}


def _parse(rows: dict[str, tuple[str, str]]) -> dict[str, dict[str, Figure]]:
    tables: dict[str, dict[str, Figure]] = {}
    for method, (rmse, log_likelihood) in rows.items():
        scores = zip(_pairs(rmse), _pairs(log_likelihood), strict=True)
        tables[method] = {name: Figure(*both) for name, both in zip(SETS, scores, strict=True)}
    return tables


def _pairs(row: str) -> list[tuple[float, float]]:
    numbers = [float(word) for word in row.split()]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


ZHANG: Final = _parse(_ZHANG)
KHAN: Final = _parse(_KHAN)

# Gal & Ghahramani's grids of the noise precision, in the data's own units; dropout probabilities are the same for all sets.
DROPOUT_PROBABILITIES: Final = (0.005, 0.01, 0.05, 0.1)
DROPOUT_PRECISIONS: Final = {
    "boston": (0.1, 0.15, 0.2),
    "concrete": (0.025, 0.05, 0.075),
    "energy": (0.25, 0.5, 0.75),
    "kin8nm": (150.0, 200.0, 250.0),
    "naval": (30000.0, 40000.0, 50000.0),
    "power": (0.05, 0.1, 0.15),
    "wine": (2.5, 3.0, 3.5),
    "yacht": (0.25, 0.5, 0.75),
}
