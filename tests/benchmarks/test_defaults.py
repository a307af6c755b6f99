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
from benchmarks.defaults.table import differences, failures, paired, table, undecided
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


@pytest.mark.parametrize(
    ("method", "broken"),
    [
        (runs([0.11, 0.12], [0.5, 0.7], 0.05), []),
        (runs([0.13, 0.12], [0.5, 0.7], 0.05), ["error"]),
        (runs([0.10, 0.12], [0.5, 0.9], 0.05), []),  # higher by 0.1 ± 0.1
        (runs([0.10, 0.12], [0.6, 0.8], 0.05), ["nll"]),
        (runs([0.10, 0.12], [0.5, 0.7], 0.06), ["calibration"]),
        (runs([0.10, 0.89], [0.5, 0.7], 0.05), ["chance", "error"]),
        (runs([0.10, 0.12], [math.nan, 0.7], 0.05), ["chance"]),
    ],
)
def test_broken_promises(method, broken):
    assert failures(method, USER, is_regression=False, chance=0.9) == broken


def test_one_run_decides_no_promise_about_a_noisy_score():
    user = runs([0.10], [0.5], 0.05)
    higher, lower, worse = runs([0.10], [0.6], 0.05), runs([0.10], [0.4], 0.05), runs([0.2], [0.6], 0.06)
    found = [(failures(method, user, False, 0.9), undecided(method, user)) for method in (higher, lower, worse)]
    assert found == [([], ["nll"]), ([], []), (["error"], ["nll", "calibration"])]
    assert undecided(USER, runs([0.1, 0.12], [0.4, 0.6], 0.05)) == []
    mean, error = paired(higher, user, "nll")
    assert math.isclose(mean, 0.1)
    assert math.isnan(error)


def test_paired_difference():
    mean, error = paired(runs([0, 0, 0], [1.0, 2.0, 6.0], 0.0), runs([0, 0, 0], [0.0, 0.0, 0.0], 0.0), "nll")
    assert (mean, error) == (3.0, stats.sem([1.0, 2.0, 6.0]))


def records(problem, method, errors):
    shared = {"problem": problem, "optimizer": "sgd", "method": method, "nll": 0.5, "calibration": 0.1, "chance": 0.9}
    return [{**shared, "seed": seed, "error": error} for seed, error in enumerate(errors)]


def test_the_table_counts_problems_on_which_every_promise_is_kept():
    found = [*records("digits", "user", [0.1, 0.2]), *records("digits", "vogn", [0.105, 0.205])]
    found += [*records("cifar-lenet", "user", [0.4]), *records("cifar-lenet", "vogn", [0.42])]
    text = table(found)
    assert "| digits | sgd | user | 2 | 0.1500 | 0.5000 | 0.1000 | – | – | – |" in text
    assert "| digits | sgd | vogn | 2 | 0.1550 | 0.5000 | 0.1000 | – | – | none |" in text
    assert "| cifar-lenet | sgd | vogn | 1 | 0.4200 | 0.5000 | 0.1000 | – | – | error |" in text
    assert text.endswith("- with sgd, vogn keeps every promise on 1 of 2 problems")


def test_the_table_counts_no_problem_that_one_seed_cannot_decide():
    found = [*records("digits", "user", [0.1]), *records("digits", "vogn", [0.1])]
    found[1]["nll"] = 0.6
    text = table(found)
    assert "nll undecided" in text
    assert "keeps every promise" not in text
    (line,) = differences(found, "user").splitlines()[2:]
    assert line == "| digits | sgd | vogn | 1 | +0.0000 | +0.1000 | +0.0000 | – | – |"


@pytest.mark.parametrize("method", [*CALLBACKS, *POSTHOC, ENSEMBLE, TEMPERATURE, PEER, "vogn@0.3~1", "vogn~0.3"])
def test_the_table_has_a_line_for_every_method(method):
    both = [*records("digits", "user", [0.1]), *records("digits", method, [0.1])]
    assert f"| digits | sgd | {method} | " in table(both)


@pytest.mark.parametrize("method", [*CALLBACKS, *POSTHOC, ENSEMBLE, TEMPERATURE, PEER])
def test_every_method_runs(method):
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
