"""The benchmark of several modes: one run from end to end on a few images, and its table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.defaults.mode_problems import PROBLEMS, Images, cropped_and_flipped
from benchmarks.defaults.mode_table import table
from benchmarks.defaults.modes import joined, run, scores


def images(generator):
    draw = [(torch.randn(n, 1, 28, 28, generator=generator), torch.arange(n) % 10) for n in (256, 20, 30)]
    return Images(*draw[0], *draw[1], *draw[2], torch.randn(10, 1, 28, 28, generator=generator))


def test_a_run_gives_modes_and_the_last_one_alone(generator):
    data, problem = images(generator), replace(PROBLEMS["fashion-vit"], epochs=3)
    found = {name: logits for name, logits, _ in run(problem, data, "modes@2/3/0.4", 0)}
    chosen, every, last = found["modes@2/3/0.4"], found["all@2/3/0.4"], found["last@2/3/0.4"]
    assert [tuple(each.test.shape) for each in (every, last)] == [(3, 30, 10), (1, 30, 10)]
    torch.testing.assert_close(every.test[-1:], last.test)
    torch.testing.assert_close(every.test[-len(chosen.test) :], chosen.test)
    both = joined([every, last])
    assert both.ood.shape == (4, 10, 10)
    assert scores(both, data).keys() >= {"error", "nll", "nll_t", "mi", "mi_auroc"}


def test_a_noisy_run_is_scored_in_several_ways(generator):
    data, problem = images(generator), replace(PROBLEMS["fashion-bn"], epochs=2, precision="32-true")
    found = {name: logits.test.shape[0] for name, logits, _ in run(problem, data, "vogn", 0)}
    assert found == {"vogn mean": 1, "vogn": 8, "vogn default": 8, "vogn bn": 8, "vogn calibrated": 8}


def test_each_noisy_mode_gives_a_sample(generator):
    problem = replace(PROBLEMS["fashion-vit"], epochs=6)
    ((name, logits, _),) = run(problem, images(generator), "vogn+modes", 0)
    assert (name, logits.test.shape[1:]) == ("vogn+modes", (30, 10))
    assert 1 <= len(logits.test) <= 3


@pytest.mark.parametrize("method", ["ivon", "ivon_paper"])
def test_ivon_takes_its_own_step(generator, method):
    data, problem = images(generator), replace(PROBLEMS["fashion-vit"], epochs=1)
    assert [name for name, *_ in run(problem, data, method, 0)] == [f"{method} mean", method, f"{method} default"]


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
