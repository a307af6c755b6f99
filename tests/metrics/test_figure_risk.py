from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_bayes.errors import ShapeError
from lightning_bayes.metrics import aurc, risk_coverage, risk_coverage_diagram


def predictions(seed):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(200, 4, generator=generator).mul(2).softmax(-1)
    return probs, torch.multinomial(probs, 1, generator=generator).squeeze(1)


@pytest.fixture(scope="module")
def curves():
    return {"Adam": predictions(0), "VOGN": predictions(1)}


def test_lines_are_the_risk_coverage_curves_above_two_percent(curves):
    (axes,) = risk_coverage_diagram(curves).axes
    for line, (probs, targets) in zip(axes.lines, curves.values(), strict=True):
        coverage, risk = (100 * column.numpy() for column in risk_coverage(probs, targets))
        shown = coverage >= 2
        assert not shown.all()
        np.testing.assert_allclose(line.get_xdata(), coverage[shown])
        np.testing.assert_allclose(line.get_ydata(), risk[shown], rtol=1e-6)


def test_the_legend_names_the_models_and_their_aurc(curves):
    (axes,) = risk_coverage_diagram(curves).axes
    expected = [f"{name}, AURC {100 * aurc(*each):.2f} %" for name, each in curves.items()]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == expected
    assert axes.get_xlabel() == "Coverage: inputs answered [%]"
    assert axes.get_ylabel() == "Risk: wrong answers [%]"


def test_a_constant_confidence_gives_one_point():
    probs = torch.tensor([[0.9, 0.1]]).expand(4, 2)
    (axes,) = risk_coverage_diagram({"flat": (probs, torch.tensor([0, 0, 0, 1]))}).axes
    assert axes.lines[0].get_xydata().tolist() == [[100, 25]]


def test_it_saves_without_a_display_and_without_pyplot(curves, tmp_path):
    risk_coverage_diagram(curves).savefig(tmp_path / "risk.png")
    assert (tmp_path / "risk.png").read_bytes().startswith(b"\x89PNG")


def test_no_model_is_refused():
    with pytest.raises(ShapeError, match=r"at least one model with its \(probs, targets\)"):
        risk_coverage_diagram({})
