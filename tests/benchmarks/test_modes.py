"""The benchmark of several modes: one run from end to end on a few images, and its table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.defaults.mode_problems import PROBLEMS, Images, cropped_and_flipped
from benchmarks.defaults.modes import scores, table, trained


def images(generator):
    draw = [(torch.randn(n, 1, 28, 28, generator=generator), torch.arange(n) % 10) for n in (256, 20, 30)]
    return Images(*draw[0], *draw[1], *draw[2], torch.randn(10, 1, 28, 28, generator=generator))


@pytest.mark.parametrize(
    ("method", "problem", "counts"),
    [
        ("short", "fashion-vit", {"short": 3}),
        ("vogn", "fashion-bn", {"vogn mean": 1, "vogn": 8, "vogn default": 8}),
    ],
)
def test_each_way_to_predict_is_scored(method, problem, counts, generator):
    data, small = images(generator), replace(PROBLEMS[problem], epochs=2, precision="32-true")
    found = dict(trained(small, data, method, 0))
    assert {name: len(logits.test) for name, logits in found.items()} == counts
    assert scores(found[method], data).keys() >= {"error", "nll", "nll_t", "mi", "mi_auroc"}


@pytest.mark.parametrize("method", ["modes", "vogn+modes"])
def test_as_many_modes_are_kept_as_the_validation_set_chooses(method, generator):
    data, problem = images(generator), replace(PROBLEMS["fashion-vit"], epochs=6)
    ((name, logits),) = trained(problem, data, method, 0)
    assert (name, logits.test.shape[1:]) == (method, (30, 10))
    assert 1 <= len(logits.test) <= 3


def test_crops_and_flips_show_every_image_within_its_padding(generator):
    x = torch.rand(64, 3, 8, 8, generator=generator) + 1
    torch.manual_seed(0)
    cropped = cropped_and_flipped(x)
    assert cropped.shape == x.shape
    for before, after in zip(x, cropped, strict=True):
        assert torch.isin(after[after > 0], before).all()


def test_an_ensemble_is_compared_with_the_users_of_its_decade():
    def record(method, seed, nll):
        names = ("error", "calibration", "mi", "entropy_auroc", "mi_auroc", "error_t", "calibration_t")
        rest = dict.fromkeys((*names, "entropy_auroc_t", "mi_auroc_t", "seconds"), 0.0)
        return {**rest, "problem": "fashion-vit", "method": method, "seed": seed, "nll": nll, "nll_t": nll - 0.1}

    rows = [record("user", 100, 1.0), record("user", 101, 1.4), record("modes", 100, 0.8), record("modes", 101, 1.0)]
    lines = {line.split("|")[2].strip(): line for line in table([*rows, record("ensemble", 100, 0.7)]).splitlines()}
    assert lines["modes"].split("|")[-2].strip() == "-0.2000 ± 0.1000"
    assert lines["ensemble"].split("|")[-2].strip() == "-0.4000"


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
def test_every_network_classifies_its_images(problem):
    channels, size = (1, 28) if problem.is_fashion else (3, 32)
    assert problem.network()(torch.zeros(2, channels, size, size)).shape == (2, 10)
