from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.metrics.figure_certainty import certainty_sheet
from lightning_bayes.metrics.figure_style import BLUE, VERMILLION

CONFIDENCES = [0.6, 0.9, 0.7, 0.8, 0.55, 0.95]
TARGETS = torch.tensor([0, 0, 1, 0, 1, 1])  # class 0 is predicted everywhere


def examples(channels=1):
    confidence = torch.tensor(CONFIDENCES)
    images = torch.arange(6.0).div(6).view(6, 1, 1, 1).expand(6, channels, 8, 8)  # image i has the constant value i/6
    return images, TARGETS, torch.stack([confidence, 1 - confidence], -1)


def shown(block):
    return [axes for axes in block.axes if axes.images]


def captions(block):
    return [axes.get_title().split("\n") for axes in shown(block)]


def test_blocks_hold_the_most_and_the_least_certain_images_in_order():
    most, least = certainty_sheet(*examples(), rows=1, columns=2).subfigs
    assert [most.get_suptitle(), least.get_suptitle()] == ["Most certain", "Least certain"]
    for block, expected in ((most, [5, 1]), (least, [4, 0])):
        pixels = [axes.images[0].get_array()[0, 0] for axes in shown(block)]
        np.testing.assert_allclose(pixels, np.array(expected) / 6)


def test_captions_show_truth_prediction_and_probability_and_mark_errors():
    most, least = certainty_sheet(*examples(), rows=1, columns=2).subfigs
    assert captions(most) == [["true 1", "pred 0", "95.0 %, WRONG"], ["true 0", "pred 0", "90.0 %"]]
    assert captions(least) == [["true 1", "pred 0", "55.0 %, WRONG"], ["true 0", "pred 0", "60.0 %"]]
    wrong, right = (axes.spines["left"] for axes in shown(most))
    assert to_hex(wrong.get_edgecolor()).upper() == VERMILLION
    assert to_hex(right.get_edgecolor()).upper() == BLUE
    assert wrong.get_linewidth() > 2 * right.get_linewidth()


def test_class_names_replace_indices_and_are_truncated():
    most, _ = certainty_sheet(*examples(), class_names=["cat", "northern flicker"], rows=1, columns=1).subfigs
    assert captions(most) == [["true northern fl…", "pred cat", "95.0 %, WRONG"]]


def test_no_image_is_in_both_blocks_when_there_are_few():
    most, least = certainty_sheet(*examples(), rows=2, columns=8).subfigs
    assert [len(shown(most)), len(shown(least))] == [3, 3]
    assert [len(most.axes), len(least.axes)] == [8, 8]  # the other tiles stay empty, and there is no second row
    assert not any(axes.axison for axes in most.axes if not axes.images)


def test_only_complete_rows_are_drawn():
    images, targets, probs = (torch.cat([part] * 3) for part in examples())
    most, least = certainty_sheet(images, targets, probs, rows=5, columns=2).subfigs  # nine for each block
    assert [len(shown(most)), len(most.axes), len(shown(least)), len(least.axes)] == [8] * 4


@pytest.mark.parametrize("channels", [1, 3])
def test_normalized_images_are_rescaled(channels):
    images = torch.linspace(-2, 3, 2 * channels * 16).view(2, channels, 4, 4)
    _, targets, probs = examples()
    for axes in shown(certainty_sheet(images, targets[:2], probs[:2], rows=1, columns=1)):
        pixels = axes.images[0].get_array()
        assert pixels.shape == ((4, 4) if channels == 1 else (4, 4, 3))
        assert pixels.min() == pytest.approx(0)
        assert pixels.max() == pytest.approx(1)


def test_invalid_input_is_refused():
    images, targets, probs = examples()
    with pytest.raises(ShapeError, match=r"got images \[6, 8, 8\] and probs \[6, 2\]\. Use unsqueeze\(1\)"):
        certainty_sheet(images[:, 0], targets, probs)
    with pytest.raises(ShapeError, match=r"got images \[5, 1, 8, 8\] and probs \[6, 2\]"):
        certainty_sheet(images[:5], targets, probs)
    with pytest.raises(ShapeError, match=r"at least two images .* got images \[1, 1, 8, 8\]"):
        certainty_sheet(images[:1], targets[:1], probs[:1])
    with pytest.raises(ShapeError, match="3 class names for 2 classes"):
        certainty_sheet(images, targets, probs, class_names=["a", "b", "c"])
    with pytest.raises(HyperparameterError, match="got rows=0, columns=8"):
        certainty_sheet(images, targets, probs, rows=0)
