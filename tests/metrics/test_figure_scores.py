from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from lightning_bayes.errors import HyperparameterError, NonFiniteError, ShapeError
from lightning_bayes.metrics import score_histograms


@pytest.fixture(scope="module")
def scores():
    generator = torch.Generator().manual_seed(0)

    def draw(shift):
        return shift + torch.randn(300, generator=generator)

    return {
        "entropy": {"test": draw(0), "photos": draw(2)},
        "max_logit": {"test": draw(-30), "photos": draw(-29)},
    }


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
            np.testing.assert_allclose(share, 100 * expected / 300)
            assert share.sum() == pytest.approx(100)


def test_an_outlier_does_not_stretch_the_axis(scores):
    values = scores["entropy"]["test"].clone()
    values[0] = 1e6
    (axes,) = score_histograms({"entropy": {"test": values}}).axes
    share, edges, _ = axes.patches[0].get_data()
    assert edges[-1] < 10
    assert share.sum() == pytest.approx(100)


def test_legends_show_the_auroc_against_the_first_set(scores):
    for axes, sets in zip(score_histograms(scores).axes, scores.values(), strict=True):
        auroc = roc_auc_score([0] * 300 + [1] * 300, torch.cat(list(sets.values())))
        texts = [text.get_text() for text in axes.get_legend().get_texts()]
        assert texts == ["test", f"photos, AUROC {100 * auroc:.1f} %"]


def test_panels_are_titled_by_their_score(scores):
    assert [axes.get_title() for axes in score_histograms(scores).axes] == ["entropy", "max logit"]


def test_values_that_are_all_equal_fill_one_bin():
    (axes,) = score_histograms({"mutual_information": {"test": torch.zeros(5)}}).axes
    assert sorted(axes.patches[0].get_data().values)[-2:] == [0, 100]


def test_it_saves_without_a_display_and_without_pyplot(scores, tmp_path):
    score_histograms(scores).savefig(tmp_path / "scores.png")
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")


def test_invalid_input_is_refused():
    with pytest.raises(ShapeError, match=r"at least one score with its \{set of inputs: values\}"):
        score_histograms({})
    with pytest.raises(ShapeError, match="at least one set of inputs for entropy"):
        score_histograms({"entropy": {}})
    with pytest.raises(ShapeError, match=r"Scores of entropy, test must be a non-empty vector .* got \[2, 1\]"):
        score_histograms({"entropy": {"test": torch.rand(2, 1)}})
    with pytest.raises(NonFiniteError, match="1 of 2 scores of energy, photos are not finite"):
        score_histograms({"energy": {"photos": torch.tensor([1.0, torch.inf])}})
    with pytest.raises(HyperparameterError, match="at least one bin, got bins=0"):
        score_histograms({"entropy": {"test": torch.rand(2)}}, bins=0)
