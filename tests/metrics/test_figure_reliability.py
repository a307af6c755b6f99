from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_bayes.errors import ShapeError
from lightning_bayes.metrics.calibration import expected_calibration_error, reliability_bins
from lightning_bayes.metrics.figure_reliability import reliability_diagram


def predictions(seed):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(200, 4, generator=generator).mul(2).softmax(-1)
    return probs, torch.randint(4, (200,), generator=generator)


@pytest.fixture(scope="module")
def curves():
    return {"Adam": predictions(0), "VOGN": predictions(1)}


def heights(bars):
    return np.array([bar.get_height() for bar in bars])


def test_bars_are_the_accuracy_and_the_gap_of_the_reliability_bins(curves):
    figure = reliability_diagram(curves, bins=10)
    assert len(figure.axes) == 4
    for axes, (probs, targets) in zip(figure.axes[:2], curves.values(), strict=True):
        accuracy, gap = axes.containers
        expected = reliability_bins(probs, targets, bins=10)
        assert expected.counts[0] == 0  # an empty bin, whose bars have no height
        np.testing.assert_allclose(heights(accuracy), 100 * expected.accuracy)
        np.testing.assert_allclose(heights(gap), 100 * (expected.confidence - expected.accuracy), rtol=1e-4)
        np.testing.assert_allclose([bar.get_y() for bar in gap], 100 * expected.accuracy)
        np.testing.assert_allclose([bar.get_x() for bar in accuracy], np.arange(10) * 10)


def test_histograms_are_the_fraction_of_examples_per_bin(curves):
    figure = reliability_diagram(curves)
    for axes, (probs, targets) in zip(figure.axes[2:], curves.values(), strict=True):
        (bars,) = axes.containers
        np.testing.assert_allclose(heights(bars), reliability_bins(probs, targets).counts / 2)  # of 200, in percent


def test_titles_name_the_model_and_its_ece_and_axes_their_units(curves):
    figure = reliability_diagram(curves)
    for axes, (name, (probs, targets)) in zip(figure.axes[:2], curves.items(), strict=True):
        assert axes.get_title() == f"{name}\nECE {100 * expected_calibration_error(probs, targets):.1f} %"
    assert [axes.get_ylabel() for axes in figure.axes] == ["Accuracy [%]", "", "Examples [%]", ""]
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "Confidence [%]", "Confidence [%]"]
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert legend == {"accuracy", "gap to the mean confidence", "perfect calibration"}


def test_it_saves_without_a_display_and_without_pyplot(curves, tmp_path):
    reliability_diagram(curves).savefig(tmp_path / "reliability.png")
    assert (tmp_path / "reliability.png").read_bytes().startswith(b"\x89PNG")


def test_no_model_is_refused():
    with pytest.raises(ShapeError, match=r"at least one model with its \(probs, targets\)"):
        reliability_diagram({})
