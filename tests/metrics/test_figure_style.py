from __future__ import annotations

import itertools

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from lightning_bayes.errors import ShapeError
from lightning_bayes.metrics.figure_style import SERIES, check_not_empty, quiet_frame

# Viénot, Brettel & Mollon 1999: linear RGB as seen without the L or the M cones.
PROTANOPIA = ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1))
DEUTERANOPIA = ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1))


@pytest.mark.parametrize("projection", [PROTANOPIA, DEUTERANOPIA], ids=["protanopia", "deuteranopia"])
def test_the_first_three_colours_are_distinguishable_without_red_or_green_cones(projection):
    seen = []
    for colour in SERIES[:3]:
        linear = [channel**2.2 for channel in to_rgb(colour)]
        seen.append([sum(w * c for w, c in zip(row, linear, strict=True)) for row in projection])
    for one, other in itertools.combinations(seen, 2):
        assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 > 0.2


def test_an_empty_figure_is_refused():
    with pytest.raises(ShapeError, match=r"Nothing to draw: pass at least one model\."):
        check_not_empty({}, "model")


def test_the_frame_has_no_upper_and_right_line():
    axes = Figure().subplots()
    quiet_frame(axes)
    assert {name for name, spine in axes.spines.items() if spine.get_visible()} == {"left", "bottom"}
