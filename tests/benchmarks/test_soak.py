"""The soak: its slope against lines with noise, and a few steps of a callback, alone and on two ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.soak import NAMES, main, slope


def test_the_slope_of_a_line_with_noise_lies_within_its_standard_error():
    """Over 300 sets of noise, (found - true) / error follows Student's t with 8 degrees of freedom."""
    noise = np.random.default_rng(0).normal(size=(300, 200))
    scores = []
    for row in noise:
        found, error = slope(list(row + 0.01 * np.arange(200)), 5)
        scores.append((found - 0.002) / error)
    variance = 8 / 6
    assert abs(np.mean(scores)) < 4 * (variance / 300) ** 0.5
    assert abs(np.var(scores) / variance - 1) < 0.6


def test_a_leak_shows():
    found, error = slope([1e6 + 4.0 * step for step in range(0, 3000, 10)], 10)
    assert found == pytest.approx(4.0)
    assert found > 100 * error


def test_the_whole_family_is_soaked():
    assert {"VOGN", "Vadam", "IVON", "NoisyAdam", "NoisyKFAC", "BBB", "VON", "OGN"} <= set(NAMES)


@pytest.mark.ddp
def test_a_few_steps_alone_and_on_two_ranks(tmp_path, capsys):
    file = tmp_path / "soak.json"
    main(["--steps", "200", "--callbacks", "VOGN", "--two-ranks", "VOGN", "--json", str(file)])
    printed = capsys.readouterr().out
    alone, both = json.loads(file.read_text("utf-8"))["rows"]
    assert (alone["ranks"], both["ranks"]) == (1, 2)
    for row in (alone, both):
        assert row["not_finite"] == row["more_tensors"] == 0
        assert row["last_loss"] < 1.5
        assert row["ranks_agree"]
        assert 0 < row["resident_mib"] < 8192
        assert row["hash"] in printed
    assert alone["hash"] != both["hash"]
