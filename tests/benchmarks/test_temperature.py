"""The rules for a temperature on a grid against the package's search, and the table of a user's first classifier."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.defaults.hour import Loaders, run
from benchmarks.defaults.hour import table as hour_table
from benchmarks.defaults.pools import FRESH, Pool
from benchmarks.defaults.temperature import LOG_C, LOG_T, chosen, losses_of, over_threshold, records, table, verdicts
from lightning_bayes.predictive import choose_calibration
from lightning_bayes.predictive.calibration import WIDTH_SHRINKAGE
from lightning_bayes.predictive.temperature import SHRINKAGE


def pool(generator, rows=400, factor=2.0):
    """Logits of three classes, too large by a factor, whose spread grows with the width."""
    mean, noise = torch.randn(1, rows, 3, generator=generator), 0.3 * torch.randn(4, rows, 3, generator=generator)
    targets = torch.distributions.Categorical(logits=mean[0]).probs.multinomial(1, generator=generator)[:, 0]
    return Pool(lambda scale: factor * (mean + scale * noise), targets)


@pytest.mark.parametrize("width", [False, True])
def test_the_grid_finds_what_the_package_chooses(width, generator):
    held_out = pool(generator)
    losses = losses_of(held_out, is_wide=True)(torch.arange(400))
    row, column = chosen(losses, SHRINKAGE, WIDTH_SHRINKAGE if width else 0)
    found = choose_calibration(held_out.outputs_at, held_out.targets, "softmax", width=width)
    assert float(LOG_C[row].exp()) == pytest.approx(found.scale, rel=0.01)
    assert float(LOG_T[column]) == pytest.approx(math.log(found.temperature), abs=0.03)


def test_few_wrong_predictions_pass_no_threshold(generator):
    held_out = pool(generator)
    losses = losses_of(held_out, is_wide=False)(torch.arange(400))
    assert over_threshold(losses, wrong=10) == chosen(losses, math.inf, 0)
    assert LOG_T[over_threshold(losses, wrong=9)[1]] == pytest.approx(0, abs=1e-6)


def test_a_regression_has_a_width_and_no_temperature(generator):
    x = torch.randn(400, 1, generator=generator)
    noise = torch.randn(8, 400, 1, generator=generator)
    held_out = Pool(lambda scale: x + scale * noise, x + 0.1 * torch.randn(400, 1, generator=generator))
    (few, *_) = records(held_out, is_wide=True)
    assert few["examples"] == 34
    assert few["c 1"] < 0
    assert "T .2" not in few


def test_a_rise_by_more_than_a_standard_error_is_listed(generator):
    rows = [
        {"problem": "svhn", "method": method, "seed": seed, **found}
        for method in ("user", "vogn")
        for seed in (0, 1)
        for found in records(pool(generator), is_wide=method == "vogn")
    ]
    assert table(rows).count("| svhn |") == 4
    assert "T .2" in verdicts(rows)
    for row in rows:
        row["T .3"] = 0.1 + 0.001 * row["seed"]
    assert "raised in 4 of 4" in next(line for line in verdicts(rows).splitlines() if line.startswith("T .3"))


def test_the_noise_of_labels_is_a_fifth(monkeypatch):
    from benchmarks.defaults import pools

    labels = torch.arange(5000) % 10
    _, y, _ = pools._noisy(lambda root, seed: (torch.zeros(5000, 1), labels, 2000))(None, 0)
    assert abs(float((y != labels).double().mean()) - 0.18) < 4 * math.sqrt(0.18 * 0.82 / 5000)
    assert FRESH.keys() >= {"quality", "mnist-noisy", "svhn", "concrete"}


def test_the_hours_table_has_a_row_for_each_method(generator, monkeypatch):
    monkeypatch.setattr("benchmarks.defaults.hour.EPOCHS", 1)

    def images(count):
        x, y = torch.randn(count, 3, 32, 32, generator=generator), torch.arange(count) % 10
        return DataLoader(TensorDataset(x, y), 20)

    data, rows = Loaders(*(images(count) for count in (40, 40, 40, 40))), []
    for method in ("adamw", "VOGNCallback()"):
        rows += [{"method": name, "seed": 0, **scores} for name, scores in run(method, data, 0).items()]
    lines = hour_table(rows).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["adamw", "adamw, T", "VOGNCallback()"]
    assert lines[3].split("|")[-2].strip() == "+0.0000"
