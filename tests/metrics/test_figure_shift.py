from __future__ import annotations

import numpy as np
import pytest

from lightning_bayes.errors import ShapeError
from lightning_bayes.metrics import shift_curves

MODELS = {
    "Adam": {
        "cls/Acc": {0: [0.9], 2: [0.7, 0.5], 1: [0.8, 0.8]},
        "cls/NLL": {0: [0.3], 1: [0.5, 0.7], 2: [1.0, 1.4]},
        "cal/ECE": {0: [0.02], 1: [0.04, 0.06], 2: [0.1, 0.2]},
    },
    "VOGN": {
        "cls/Acc": {0: [0.88], 1: [0.82], 2: [0.7]},
        "cls/NLL": {0: [0.3], 1: [0.4], 2: [0.8]},
        "cal/ECE": {0: [0.01], 1: [0.02], 2: [0.03]},
    },
}


def test_lines_are_means_over_kinds_in_the_order_of_severity():
    figure = shift_curves(MODELS)
    accuracy, nll, ece = ([line.get_xydata() for line in axes.lines] for axes in figure.axes)
    np.testing.assert_allclose(accuracy[0], [[0, 90], [1, 80], [2, 60]])
    np.testing.assert_allclose(nll[0], [[0, 0.3], [1, 0.6], [2, 1.2]])
    np.testing.assert_allclose(ece[0], [[0, 2], [1, 5], [2, 15]])
    np.testing.assert_allclose(accuracy[1], [[0, 88], [1, 82], [2, 70]])


def test_bands_span_the_lowest_and_highest_kind():
    band, _ = shift_curves(MODELS).axes[0].collections
    at_two = [y for x, y in band.get_paths()[0].vertices if x == 2]
    assert (min(at_two), max(at_two)) == pytest.approx((50, 70))


def test_axes_have_names_and_units_and_the_first_a_legend():
    figure = shift_curves(MODELS)
    assert [axes.get_ylabel() for axes in figure.axes] == ["Accuracy [%]", "NLL [nats]", "ECE [%]"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"Severity of the shift"}
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["Adam", "VOGN"]


def test_it_saves_without_a_display_and_without_pyplot(tmp_path):
    shift_curves(MODELS).savefig(tmp_path / "shift.png")
    assert (tmp_path / "shift.png").read_bytes().startswith(b"\x89PNG")


def test_no_model_is_refused():
    with pytest.raises(ShapeError, match=r"at least one model with its \{metric: \{severity: values\}\}"):
        shift_curves({})
