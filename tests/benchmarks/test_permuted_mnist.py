"""Tasks in turn on images of noise: which prior each method passes on, and what is kept."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from fake_images import write_idx_sets

from benchmarks.papers import permuted_mnist as command
from lightning_bayes import MeanField

TINY = command.Settings(tasks=3, epochs=1, batch=8, hidden=4)


def rows(count):
    generator = torch.Generator().manual_seed(count)
    return torch.rand(count, 784, generator=generator), torch.arange(count) % 10


def test_the_control_keeps_means_and_all_precisions_of_a_tensor():
    precision = torch.rand(5, 7, generator=torch.Generator().manual_seed(0))
    before = MeanField({"w": torch.zeros(5, 7)}, {"w": precision}, {"w": 1.0}, 10)
    after = command.shuffled(before, seed=1)
    assert torch.equal(after.mean["w"], before.mean["w"])
    assert not torch.equal(after.precision["w"], precision)
    assert torch.equal(after.precision["w"].flatten().sort().values, precision.flatten().sort().values)


def test_every_task_has_its_own_order_of_the_pixels():
    orders = [command.permutation(seed, task) for seed in (0, 1) for task in (0, 1)]
    assert all(torch.equal(order.sort().values, torch.arange(784)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 4


@pytest.mark.parametrize("method", ["posterior", "permuted", "scalar"])
def test_a_task_gets_the_posterior_of_those_before(method, monkeypatch):
    priors, found, fit = [], [], command.fit_vogn

    def recorded(model, data, settings, seed, prior):
        priors.append(prior)
        found.append(fit(model, data, settings, seed, prior))
        return found[-1]

    monkeypatch.setattr(command, "fit_vogn", recorded)
    row = command.run(method, rows(30), rows(10), TINY, seed=0)
    assert [len(accuracies) for accuracies in row["accuracy"]] == [1, 2, 3]
    assert len(row["sampled"]) == 3
    assert priors[0] is None
    for prior, before in zip(priors[1:], found, strict=False):
        if method == "scalar":
            assert prior is None
            continue
        assert torch.equal(prior.mean["0.weight"], before.mean["0.weight"])
        assert torch.equal(prior.precision["0.weight"], before.precision["0.weight"]) == (method == "posterior")


def test_the_last_posterior_is_that_of_all_tasks():
    """Precisions grow by what each task adds, and the prior of one number is the first task's alone."""
    train = rows(30)
    torch.manual_seed(0)
    model = command.network(TINY.hidden)
    first = command.fit_vogn(model, train, TINY, 0, None)
    second = command.fit_vogn(model, train, replace(TINY, prior_precision=1e4), 1, first)
    assert first.prior_precision["0.weight"] == TINY.prior_precision
    for name, precision in second.precision.items():
        assert torch.equal(second.prior_precision[name], first.precision[name])
        assert (precision >= first.precision[name]).all()
        assert (precision > first.precision[name]).any()


def test_a_run_is_kept_and_resumed(tmp_path, capsys):
    write_idx_sets(tmp_path)
    result, figure = tmp_path / "result.json", tmp_path / "figure.png"
    small = ["--tasks", "2", "--epochs", "1", "--batch", "8", "--hidden", "4"]
    arguments = ["--root", str(tmp_path), "--json", str(result), "--figure", str(figure), *small]
    command.main([*arguments, "--seeds", "0"])
    first = json.loads(result.read_text("utf-8"))["rows"]
    assert [row["method"] for row in first] == list(command.METHODS)
    command.main([*arguments, "--seeds", "0", "1"])
    again = json.loads(result.read_text("utf-8"))["rows"]
    assert again[:4] == first
    assert len(again) == 8
    assert figure.stat().st_size > 1000
    assert "| VOGN, Osawa et al. 2019 | 0.940 ± 0.008 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main([*arguments, "--lr", "0.5"])
