"""Tasks in turn on images of noise: which prior each method passes on, and what is kept."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from fake_images import write_idx_sets

from benchmarks.papers import permuted_mnist as command
from lightning_bayes import MeanField

TINY = command.Settings(tasks=3, epochs=1, batch=8, hidden=4, init_precision=100.0, beta=0.9)


def rows(count):
    generator = torch.Generator().manual_seed(count)
    return torch.rand(count, 784, generator=generator), torch.arange(count) % 10


def posterior(precision):
    return MeanField({"w": torch.zeros(5, 7)}, {"w": precision}, {"w": 1.0}, 10)


def test_the_controls_keep_means_and_move_precisions_within_a_tensor(generator):
    precision = torch.rand(5, 7, generator=generator)
    permuted, scalar = (command.prior_after(m, posterior(precision), 1).precision["w"] for m in ("permuted", "scalar"))
    assert not torch.equal(permuted, precision)
    assert torch.equal(permuted.flatten().sort().values, precision.flatten().sort().values)
    assert torch.equal(scalar, precision.mean().expand(5, 7))


def test_every_task_has_its_own_order_of_the_pixels():
    orders = [command.permutation(seed, task) for seed in (0, 1) for task in (0, 1)]
    assert all(torch.equal(order.sort().values, torch.arange(784)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 4


def learned(method, settings=TINY, state=None):
    learner = command.started(method, 0, settings, state)
    for row in command.run(learner, rows(30), rows(10), settings, state):
        yield row, learner


@pytest.mark.parametrize("method", ["posterior", "permuted", "scalar"])
def test_a_task_gets_the_posterior_of_those_before(method, monkeypatch):
    priors, found, fit = [], [], command.fit_vogn

    def recorded(model, data, settings, seed, prior):
        priors.append(prior)
        found.append(fit(model, data, settings, seed, prior))
        return found[-1]

    monkeypatch.setattr(command, "fit_vogn", recorded)
    *_, (row, _) = learned(method)
    assert [len(accuracies) for accuracies in row["accuracy"]] == [1, 2, 3]
    assert len(row["sampled"]) == 3
    assert priors[0] is None
    for prior, before in zip(priors[1:], found, strict=False):
        assert torch.equal(prior.mean["0.weight"], before.mean["0.weight"])
        assert torch.equal(prior.precision["0.weight"], before.precision["0.weight"]) == (method == "posterior")


@pytest.mark.parametrize("method", ["posterior", "adam"])
def test_a_run_stopped_after_a_task_goes_on_to_the_same_weights(method, tmp_path):
    state = tmp_path / "state.pt"
    for _ in learned(method, state=state):
        break  # after the first task
    *_, (row, resumed) = learned(method, state=state)
    *_, (_, whole) = learned(method)
    assert len(row["accuracy"]) == 3
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])


@pytest.mark.parametrize("samples", [1, 2])
def test_a_task_starts_from_the_stated_precision(samples):
    """A tiny share of new curvature in each update leaves the posterior at the initial precision."""
    model = command.network(TINY.hidden)
    settings = replace(TINY, beta=1 - 1e-9, samples=samples)
    found = command.fit_vogn(model, rows(30), settings, 0, None)
    for precision in found.precision.values():
        torch.testing.assert_close(precision, torch.full_like(precision, settings.init_precision))


def test_the_last_posterior_is_that_of_all_tasks():
    """Precisions grow by what each task adds, and the prior of one number is the first task's alone."""
    train = rows(30)
    torch.manual_seed(0)
    model = command.network(TINY.hidden)
    first = command.fit_vogn(model, train, TINY, 0, None)
    second = command.fit_vogn(model, train, replace(TINY, prior_precision=50.0), 1, first)
    assert first.prior_precision["0.weight"] == TINY.prior_precision
    for name, precision in second.precision.items():
        assert torch.equal(second.prior_precision[name], first.precision[name])
        assert (precision >= first.precision[name]).all()
        assert (precision > first.precision[name]).any()


def test_a_run_is_kept_and_resumed(tmp_path, capsys):
    write_idx_sets(tmp_path)
    result, figure = tmp_path / "result.json", tmp_path / "figure.png"
    small = ["--tasks", "2", "--epochs", "1", "--batch", "8", "--hidden", "4"]
    arguments = ["--root", str(tmp_path), "--json", str(result), "--work", str(tmp_path / "work"), *small]
    command.main([*arguments, "--seeds", "0"])
    first = json.loads(result.read_text("utf-8"))["rows"]
    assert [row["method"] for row in first] == list(command.METHODS)
    command.main([*arguments, "--seeds", "0", "1", "--figure", str(figure)])
    again = json.loads(result.read_text("utf-8"))["rows"]
    assert again[:4] == first
    assert len(again) == 8
    assert figure.stat().st_size > 1000
    assert "| VOGN, Osawa et al. 2019 | | 0.940 ± 0.008 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main([*arguments, "--lr", "0.5"])
