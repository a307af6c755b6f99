"""Scores and promises of the benchmark of defaults, and one run from end to end."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import log_loss

from benchmarks.defaults.methods import CALLBACKS, ENSEMBLE, MEMBERS, PEER, POSTHOC, TEMPERATURE, make_callback
from benchmarks.defaults.problems import PROBLEMS
from benchmarks.defaults.scores import classification_scores, regression_scores
from benchmarks.defaults.training import train_and_predict


def test_classification_scores_are_those_of_the_mean_probability(generator):
    outputs = torch.randn(7, 50, 3, generator=generator)
    targets = torch.randint(3, (50,), generator=generator)
    probs = outputs.double().softmax(-1).mean(0)
    scores = classification_scores(outputs, targets)
    assert math.isclose(scores["nll"], log_loss(targets, probs, labels=[0, 1, 2]))
    assert math.isclose(scores["error"], 1 - float((probs.argmax(-1) == targets).double().mean()))


def test_regression_scores_are_those_of_the_mixture(generator):
    outputs = torch.randn(6, 40, 2, generator=generator)
    targets = torch.randn(40, generator=generator)
    mean, std = outputs[..., 0].double().numpy(), outputs[..., 1].double().exp().numpy()
    y = targets.double().numpy()
    density = stats.norm.pdf(y, mean, std).mean(0)
    rank = stats.norm.cdf(y, mean, std).mean(0)
    levels = np.arange(1, 20) / 20
    scores = regression_scores(outputs, targets)
    assert math.isclose(scores["nll"], -np.log(density).mean(), rel_tol=1e-6)
    assert math.isclose(scores["error"], np.sqrt(np.mean((mean.mean(0) - y) ** 2)), rel_tol=1e-6)
    expected = np.mean([abs((rank <= level).mean() - level) for level in levels])
    assert math.isclose(scores["calibration"], expected, rel_tol=1e-5)


def runs(error, nll, calibration):
    return [{"error": e, "nll": n, "calibration": calibration} for e, n in zip(error, nll, strict=True)]


USER = runs([0.10, 0.12], [0.5, 0.7], 0.05)


@pytest.mark.parametrize("method", [*CALLBACKS, *POSTHOC, ENSEMBLE, TEMPERATURE, PEER])
def test_every_method_runs(method):
    if method == PEER:
        pytest.importorskip("ivon", reason="the package ivon-opt is in the extra `bench`")
    problem = replace(PROBLEMS["digits-100"], epochs=2 if method == "swag" else 1)
    data = problem.load(Path(), 0)
    outputs, _ = train_and_predict(problem, data, "adam", method, seed=0)
    assert outputs.test.shape[1:] == (len(data.test_y), 10)
    counts = {"user": [1], "ogn": [1], ENSEMBLE: [MEMBERS], TEMPERATURE: [1]}
    assert len(outputs.test) in counts.get(method, [20])
    assert outputs.test.isfinite().all()


def test_a_method_is_spelled_with_its_noise():
    found = make_callback("vogn@0.3~1", seed=0).group_defaults
    assert (found["relative_noise"], found["noise_flatness"]) == (0.3, 1)
    assert make_callback("flat@0.1", seed=0).group_defaults["relative_noise"] == 0.1
    with pytest.raises(ValueError, match=r"'vogn@' is not a method\. Methods are user, ogn, vogn"):
        make_callback("vogn@", seed=0)
