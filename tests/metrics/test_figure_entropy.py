from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_bayes.errors import HyperparameterError, NonFiniteError, ShapeError
from lightning_bayes.metrics.figure_histograms import entropy_histogram


@pytest.fixture(scope="module")
def entropies():
    generator = torch.Generator().manual_seed(0)

    def draw(size, scale):
        return scale * torch.rand(size, generator=generator)

    return {
        "Adam": {"digits": draw(100, 0.5), "photos": draw(30, 1.0)},
        "VOGN": {"digits": draw(100, 1.0), "photos": draw(30, 2.3)},
    }


def test_outlines_are_fractions_in_shared_bins(entropies):
    figure = entropy_histogram(entropies, bins=12)
    largest = max(values.max().item() for sets in entropies.values() for values in sets.values())
    assert len(figure.axes) == 2
    for axes, sets in zip(figure.axes, entropies.values(), strict=True):
        for patch, values in zip(axes.patches, sets.values(), strict=True):
            share, edges, _ = patch.get_data()
            expected, _ = np.histogram(values.double(), bins=12, range=(0, largest))
            np.testing.assert_allclose(share, 100 * expected / len(values))
            np.testing.assert_allclose(edges, np.linspace(0, largest, 13))
            assert share.sum() == pytest.approx(100)


def test_panels_name_the_model_the_sets_and_the_units(entropies):
    figure = entropy_histogram(entropies, title="Who knows?")
    assert figure.get_suptitle() == "Who knows?"
    assert [axes.get_title() for axes in figure.axes] == ["Adam", "VOGN"]
    assert [axes.get_xlabel() for axes in figure.axes] == ["Entropy [nats]"] * 2
    assert [axes.get_ylabel() for axes in figure.axes] == ["Fraction of the set [%]", ""]
    for axes in figure.axes:
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["digits", "photos"]


def test_rounding_below_zero_and_entropies_of_zero_are_counted():
    figure = entropy_histogram({"certain": {"all": torch.tensor([0.0, -1e-8])}})
    assert figure.axes[0].patches[0].get_data().values[0] == 100


def test_it_saves_without_a_display_and_without_pyplot(entropies, tmp_path):
    entropy_histogram(entropies).savefig(tmp_path / "entropy.png")
    assert (tmp_path / "entropy.png").read_bytes().startswith(b"\x89PNG")


def test_invalid_input_is_refused():
    some = torch.tensor([0.5])
    with pytest.raises(ShapeError, match=r"at least one model with its \{set of inputs: entropies\}"):
        entropy_histogram({})
    with pytest.raises(ShapeError, match="at least one set of inputs for VOGN"):
        entropy_histogram({"VOGN": {}})
    with pytest.raises(
        ShapeError, match=r"Entropies of VOGN, digits must be a non-empty vector \[inputs\], got \[2, 1\]"
    ):
        entropy_histogram({"VOGN": {"digits": torch.rand(2, 1)}})
    with pytest.raises(ShapeError, match=r"VOGN, digits must be a non-empty vector .* got \[0\]"):
        entropy_histogram({"VOGN": {"digits": torch.rand(0)}})
    with pytest.raises(NonFiniteError, match="1 of 2 entropies of VOGN, photos are not finite"):
        entropy_histogram({"VOGN": {"digits": some, "photos": torch.tensor([1.0, torch.nan])}})
    with pytest.raises(HyperparameterError, match="at least one bin, got bins=0"):
        entropy_histogram({"VOGN": {"digits": some}}, bins=0)
