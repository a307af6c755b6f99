"""Trials, correlations and verdicts of the predictive variances; NUTS where its posterior is known."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.papers import predictive_variance as command
from benchmarks.papers.predictive_variance import (
    LEARNERS,
    NUM_QUERY,
    NUM_TRAIN,
    SETTING,
    Chains,
    Reference,
    correlations,
    load_trials,
    promises,
    reference,
    table,
    variances,
)
from benchmarks.papers.regression.data import Batch, Splits

TINY = replace(SETTING, epochs=3, eval_samples=20)


def test_a_trial_asks_about_rows_that_it_did_not_train_on(root):
    trials = load_trials(root, "yacht", 3)
    assert trials.train.inputs.shape == (3, NUM_TRAIN, 4)
    assert trials.test.inputs.shape == (3, NUM_QUERY, 4)
    with np.load(root / "yacht.npz") as stored:
        spread = stored["data"][:, :3].std(0)
    for train, test in zip(trials.train.inputs, trials.test.inputs, strict=True):
        torch.testing.assert_close(train[:, :3].mean(0), torch.zeros(3), atol=1e-5, rtol=0)
        torch.testing.assert_close(train[:, :3].std(0, correction=0), torch.ones(3))
        assert torch.cdist(train.double(), test.double()).min() > 1e-3 * spread.min()
    assert not torch.equal(trials.train.targets[0], trials.train.targets[1])


def test_correlations_are_numpys(generator):
    left, right = torch.rand(4, 30, generator=generator), torch.rand(4, 30, generator=generator)
    expected = [np.corrcoef(a, b)[0, 1] for a, b in zip(left.numpy(), right.numpy(), strict=True)]
    np.testing.assert_allclose(correlations(left, 5 + 2 * right), expected, atol=1e-6)


@pytest.mark.parametrize("method", LEARNERS)
def test_variances_are_positive_and_larger_far_from_the_data(method, root):
    trials = load_trials(root, "yacht", 2)
    far = trials.test.inputs.clone()
    far[..., :3] *= 100
    for inputs, larger in ((trials.test.inputs, False), (far, True)):
        found = variances(method, trials._replace(test=trials.test._replace(inputs=inputs)), TINY)
        assert found.shape == (2, NUM_QUERY)
        assert found.min() > 0
        assert (found.mean() > 100) == larger


@pytest.mark.slow
def test_nuts_without_data_samples_the_prior():
    """Var f(x) = (1 + H |x|²/2) / δ² for weights of variance 1/δ, if the 1 of the hidden bias is in x and δ = 1."""
    pytest.importorskip("numpyro", reason="the reference needs numpyro, of the extra bench")
    inputs = torch.tensor([[[0.0, 1.0], [2.0, 1.0], [-3.0, 1.0]]])
    nothing = Batch(torch.empty(1, 0, 2), torch.empty(1, 0))
    trials = Splits(nothing, Batch(inputs, torch.zeros(1, 3)), torch.ones(1))
    found = reference(trials, num_hidden=4, prior_precision=1.0, chains=Chains(chains=2, warm_up=300, samples=3000))
    expected = 1 + 4 * inputs.square().sum(-1) / 2
    torch.testing.assert_close(found.variances, expected, rtol=0.15, atol=0)  # kurtosis 5 or so: 4 % standard error
    torch.testing.assert_close(found.halves.mean(0), found.variances, rtol=0.1, atol=0)


def row(name, method, *values):
    return {"set": name, "method": method, "correlations": list(values)}


def test_promises_compare_the_means_over_sets():
    values = {"bbb": 0.5, "noisy_adam_fisher": 0.85, "noisy_kfac": 0.8, "block_tridiagonal": 0.8}
    rows = [row("boston", method, value - 0.1, value + 0.1) for method, value in values.items()]
    assert list(promises(rows)) == [
        "kept: Block-tridiagonal 0.800 ≥ Noisy K-FAC 0.800",
        "kept: Noisy K-FAC 0.800 ≥ BBB 0.500",
        "BROKEN: Noisy K-FAC 0.800 ≥ Noisy Adam, Fisher 0.850",
    ]
    assert len(list(promises(rows[:3]))) == 2  # without the block-tridiagonal posterior


def test_the_table_has_errors_and_the_published_values():
    lines = table([row("boston", "nuts", 1.0), row("boston", "noisy_kfac", 0.8, 0.9)]).splitlines()
    assert lines[2] == "| boston | 1.0000 | 0.8500 ± 0.0500 (0.891 ± 0.021) |"
    assert lines[3] == "| mean | 1.000 | 0.850 |"


def test_a_run_keeps_its_results_and_does_not_repeat_them(root, tmp_path, monkeypatch, capsys):
    pytest.importorskip("numpyro", reason="the command asks for numpyro, of the extra bench")
    asked = []

    def sample(trials, num_hidden, prior_precision, chains):
        asked.append((num_hidden, prior_precision, chains.samples))
        found = trials.test.inputs.square().sum(-1)
        return Reference(found, torch.stack([found, found]))

    monkeypatch.setattr(command, "reference", sample)
    result = tmp_path / "result.json"
    arguments = ["--root", str(root), "--sets", "yacht", "--trials", "2", "--epochs", "2", "--samples", "7"]
    for _ in range(2):
        command.main([*arguments, "--json", str(result)])
    assert asked == [(10, 1.0, 7)]
    rows = json.loads(result.read_text("utf-8"))["results"]
    assert [found["method"] for found in rows] == ["nuts", *LEARNERS]
    assert rows[0]["correlations"] == pytest.approx([1, 1])
    assert "Noisy K-FAC" in capsys.readouterr().out
