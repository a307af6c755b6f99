"""Figures show the numbers of their metrics, with names and units, and refuse what cannot be drawn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from sklearn.metrics import roc_auc_score

from lightning_bayes.errors import HyperparameterError, NonFiniteError, ShapeError
from lightning_bayes.metrics import (
    expected_calibration_error,
    reliability_diagram,
    risk_coverage_diagram,
    score_histograms,
    shift_curves,
)
from lightning_bayes.metrics.calibration import reliability_bins
from lightning_bayes.metrics.figure_style import SERIES, quiet_frame
from lightning_bayes.metrics.selective import aurc, risk_coverage
from lightning_bayes.metrics.top_label import top_label

# Viénot, Brettel & Mollon 1999: linear RGB as seen without the L or the M cones.
PROTANOPIA = ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1))
DEUTERANOPIA = ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1))
SHIFTS = {
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


def predictions(seed):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(200, 4, generator=generator).mul(2).softmax(-1)
    return probs, torch.multinomial(probs, 1, generator=generator).squeeze(1)


@pytest.fixture(scope="module")
def curves():
    return {"Adam": predictions(0), "VOGN": predictions(1)}


@pytest.fixture(scope="module")
def scores():
    generator = torch.Generator().manual_seed(0)

    def draw(shift):
        return shift + torch.randn(300, generator=generator)

    return {
        "entropy": {"test": draw(0), "photos": draw(2)},
        "max_logit": {"test": draw(-30), "photos": draw(-29)},
    }


def test_figures_save_without_a_display_and_without_pyplot(curves, scores, tmp_path):
    for figure in (
        reliability_diagram(curves),
        risk_coverage_diagram(curves),
        score_histograms(scores),
        shift_curves(SHIFTS),
    ):
        figure.savefig(tmp_path / "figure.png")
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("figure", "needed"),
    [
        (reliability_diagram, r"model with its \(probs, targets\)"),
        (risk_coverage_diagram, r"model with its \(probs, targets\)"),
        (score_histograms, r"score with its \{set of inputs: values\}"),
        (shift_curves, r"model with its \{metric: \{severity: values\}\}"),
    ],
)
def test_an_empty_figure_is_refused(figure, needed):
    with pytest.raises(ShapeError, match=f"Nothing to draw: pass at least one {needed}"):
        figure({})


def test_histograms_refuse_values_that_cannot_be_counted():
    for sets, error, message in [
        ({}, ShapeError, "at least one set of inputs for VOGN"),
        ({"digits": torch.rand(2, 1)}, ShapeError, r"Scores of VOGN, digits must be .*vector.*got \[2, 1\]"),
        ({"digits": torch.rand(0)}, ShapeError, r"VOGN, digits must be a non-empty vector .* got \[0\]"),
        ({"photos": torch.tensor([1.0, torch.nan])}, NonFiniteError, "1 of 2 scores of VOGN, photos are not finite"),
        ({"photos": torch.tensor([1.0, torch.inf])}, NonFiniteError, "1 of 2 scores of VOGN, photos are not finite"),
    ]:
        with pytest.raises(error, match=message):
            score_histograms({"VOGN": sets})
    with pytest.raises(HyperparameterError, match="at least one bin, got bins=0"):
        score_histograms({"VOGN": {"digits": torch.rand(2)}}, bins=0)


@pytest.mark.parametrize("projection", [PROTANOPIA, DEUTERANOPIA], ids=["protanopia", "deuteranopia"])
def test_the_first_three_colours_are_distinguishable_without_red_or_green_cones(projection):
    seen = []
    for colour in SERIES[:3]:
        linear = [channel**2.2 for channel in to_rgb(colour)]
        seen.append([sum(w * c for w, c in zip(row, linear, strict=True)) for row in projection])
    for one, other in itertools.combinations(seen, 2):
        assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 > 0.2


def test_the_frame_has_no_upper_and_right_line():
    axes = Figure().subplots()
    quiet_frame(axes)
    assert {name for name, spine in axes.spines.items() if spine.get_visible()} == {"left", "bottom"}


def heights(bars):
    return np.array([bar.get_height() for bar in bars])


def test_bars_are_the_accuracy_and_the_gap_of_the_reliability_bins(curves):
    figure = reliability_diagram(curves, bins=10)
    assert len(figure.axes) == 4
    for axes, (probs, targets) in zip(figure.axes[:2], curves.values(), strict=True):
        accuracy, gap = axes.containers
        expected = reliability_bins(probs, targets, bins=10)
        assert expected.counts[0] == 0  # an empty bin, whose bars have no height
        np.testing.assert_allclose(heights(accuracy), expected.accuracy)
        np.testing.assert_allclose(heights(gap), expected.confidence - expected.accuracy, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose([bar.get_y() for bar in gap], expected.accuracy)
        np.testing.assert_allclose([bar.get_x() for bar in accuracy], np.arange(10) / 10)


def test_models_with_the_same_diagram_share_one(curves):
    (name, (probs, targets)), *_ = curves.items()
    figure = reliability_diagram({name: (probs, targets), "its mean": (probs.clone(), targets)})
    assert len(figure.axes) == 2
    assert figure.axes[0].get_title().startswith(f"{name} and its mean\nECE ")


def test_histograms_are_the_fraction_of_examples_per_bin(curves):
    figure = reliability_diagram(curves)
    for axes, (probs, targets) in zip(figure.axes[2:], curves.values(), strict=True):
        (bars,) = axes.containers
        np.testing.assert_allclose(heights(bars), reliability_bins(probs, targets).counts / 200)


def test_titles_name_the_model_and_its_ece_and_axes_their_units(curves):
    figure = reliability_diagram(curves)
    for axes, (name, (probs, targets)) in zip(figure.axes[:2], curves.items(), strict=True):
        assert axes.get_title() == f"{name}\nECE {expected_calibration_error(probs, targets):.4f}"
    assert [axes.get_ylabel() for axes in figure.axes] == ["Accuracy", "", "Examples", ""]
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "Confidence", "Confidence"]
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert legend == {"accuracy", "gap to the mean confidence", "perfect calibration"}


def test_lines_are_the_risk_coverage_curves_above_two_percent(curves):
    (axes,) = risk_coverage_diagram(curves).axes
    for line, (probs, targets) in zip(axes.lines, curves.values(), strict=True):
        coverage, risk = (column.numpy() for column in risk_coverage(*top_label(probs, targets)))
        shown = coverage >= 0.02
        assert not shown.all()
        np.testing.assert_allclose(line.get_xdata(), coverage[shown])
        np.testing.assert_allclose(line.get_ydata(), risk[shown], rtol=1e-6)


def test_the_legend_names_the_models_and_their_aurc(curves):
    (axes,) = risk_coverage_diagram(curves).axes
    expected = [f"{name}, AURC {aurc(*top_label(*each)):.4f}" for name, each in curves.items()]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == expected
    assert axes.get_xlabel() == "Coverage: inputs answered"
    assert axes.get_ylabel() == "Risk: wrong answers"


def test_a_constant_confidence_gives_one_point():
    probs = torch.tensor([[0.9, 0.1]]).expand(4, 2)
    (axes,) = risk_coverage_diagram({"flat": (probs, torch.tensor([0, 0, 0, 1]))}).axes
    assert axes.lines[0].get_xydata().tolist() == [[1, 0.25]]


def test_outlines_are_fractions_that_sum_to_one_per_set(scores):
    figure = score_histograms(scores, bins=12)
    assert len(figure.axes) == 2
    for axes, sets in zip(figure.axes, scores.values(), strict=True):
        low, high = (
            torch.cat(list(sets.values())).double().sort().values[[3, -4]].tolist()
        )  # half a percent of 600 is three
        for patch, values in zip(axes.patches, sets.values(), strict=True):
            share, edges, _ = patch.get_data()
            np.testing.assert_allclose(edges, np.linspace(low, high, 13))
            expected, _ = np.histogram(values.double().clip(low, high), bins=12, range=(low, high))
            np.testing.assert_allclose(share, expected / 300)
            assert share.sum() == pytest.approx(1)


def test_an_outlier_does_not_stretch_the_axis(scores):
    values = scores["entropy"]["test"].clone()
    values[0] = 1e6
    (axes,) = score_histograms({"entropy": {"test": values}}).axes
    share, edges, _ = axes.patches[0].get_data()
    assert edges[-1] < 10
    assert share.sum() == pytest.approx(1)


def test_legends_show_the_auroc_against_the_first_set(scores):
    for axes, sets in zip(score_histograms(scores).axes, scores.values(), strict=True):
        auroc = roc_auc_score([0] * 300 + [1] * 300, torch.cat(list(sets.values())))
        texts = [text.get_text() for text in axes.get_legend().get_texts()]
        assert texts == ["test", f"photos, AUROC {auroc:.3f}"]


def test_panels_are_titled_by_their_score(scores):
    assert [axes.get_legend().get_title().get_text() for axes in score_histograms(scores).axes] == [
        "entropy",
        "max logit",
    ]


def test_values_that_are_all_equal_fill_one_bin():
    (axes,) = score_histograms({"mutual_information": {"test": torch.zeros(5)}}).axes
    assert sorted(axes.patches[0].get_data().values)[-2:] == [0, 1]


def test_lines_are_means_over_kinds_in_the_order_of_severity():
    figure = shift_curves(SHIFTS)
    accuracy, nll, ece = ([line.get_xydata() for line in axes.lines] for axes in figure.axes)
    np.testing.assert_allclose(accuracy[0], [[0, 0.9], [1, 0.8], [2, 0.6]])
    np.testing.assert_allclose(nll[0], [[0, 0.3], [1, 0.6], [2, 1.2]])
    np.testing.assert_allclose(ece[0], [[0, 0.02], [1, 0.05], [2, 0.15]])
    np.testing.assert_allclose(accuracy[1], [[0, 0.88], [1, 0.82], [2, 0.7]])


def test_bands_span_the_lowest_and_highest_kind():
    band, _ = shift_curves(SHIFTS).axes[0].collections
    at_two = [y for x, y in band.get_paths()[0].vertices if x == 2]
    assert (min(at_two), max(at_two)) == pytest.approx((0.5, 0.7))


def test_axes_have_names_and_units_and_the_first_a_legend():
    figure = shift_curves(SHIFTS)
    assert [axes.get_ylabel() for axes in figure.axes] == ["Accuracy", "NLL [nats]", "ECE"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"Severity of the shift"}
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["Adam", "VOGN"]
