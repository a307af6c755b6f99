"""The logistic regressions on the toy, which needs no file, and their metrics against other computations."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from benchmarks.papers.logistic.__main__ import main, table
from benchmarks.papers.logistic.methods import METHODS, Rates, last, train
from benchmarks.papers.logistic.mlp import LEARNERS, Learner, curve, tuned
from benchmarks.papers.logistic.model import load, log_loss, mean_field_optimum, negative_elbo, symmetric_kl
from lightning_bayes.errors import DatasetError
from lightning_bayes.optim import BBB


@pytest.fixture(scope="module")
def toy():
    """The toy with a stronger prior: the paper's takes ten thousands of updates."""
    return load("toy", None, 2)._replace(prior_precision=1.0)


@pytest.fixture(scope="module")
def exact(toy):
    return mean_field_optimum(toy)


def test_the_toy_is_murphys(toy):
    """60 points in the plane: 30 round (1, 5), and 30 round (-5, 1) with a standard deviation of 2.2."""
    assert toy.train_x.shape == (2, 60, 2)
    ones, zeros = toy.test_x[0][toy.test_y[0] == 1], toy.test_x[0][toy.test_y[0] == 0]
    torch.testing.assert_close(ones.mean(0), torch.tensor([1.0, 5.0]), rtol=0, atol=4 / len(ones) ** 0.5)
    torch.testing.assert_close(zeros.mean(0), torch.tensor([-5.0, 1.0]), rtol=0, atol=4 * 2.2 / len(zeros) ** 0.5)
    torch.testing.assert_close(zeros.std(0), torch.full((2,), 2.2), rtol=4 / (2 * len(zeros)) ** 0.5, atol=0)


def test_bound_and_log_loss_are_those_of_samples(toy, exact):
    """100 000 draws from q."""
    mean, std = exact[0][0], exact[1][0].rsqrt()
    theta = mean + std * torch.randn(100_000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nll = torch.nn.functional.softplus((1 - 2 * toy.train_y[0]) * (theta @ toy.train_x[0].double().T)).sum(1)
    kl = kl_divergence(Normal(mean, std), Normal(0.0, toy.prior_precision**-0.5)).sum()
    found = (nll.mean() + kl) / 60
    assert abs(float(negative_elbo(toy, *exact)[0] - found)) < 4 * float(nll.std()) / 60 / 100_000**0.5
    right = ((2 * toy.test_y[0] - 1) * (theta[:5000] @ toy.test_x[0].double().T)).sigmoid().mean(0)
    assert float(log_loss(toy, *exact)[0]) == pytest.approx(float(-right.log2().mean()), rel=0.05)


def test_symmetric_kl_is_that_of_torch(exact):
    mean, precision = exact
    other = mean + 0.3, 2 * precision
    p, q = Normal(mean, precision.rsqrt()), Normal(other[0], other[1].rsqrt())
    expected = (kl_divergence(p, q) + kl_divergence(q, p)).sum(1)
    torch.testing.assert_close(symmetric_kl(mean, precision, *other), expected)


def test_nothing_near_the_optimum_is_better(toy, exact):
    best = negative_elbo(toy, *exact)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        shift, factor = (0.05 * torch.randn(2, 2, generator=generator, dtype=torch.float64) for _ in range(2))
        assert (negative_elbo(toy, exact[0] + shift * exact[1].rsqrt(), exact[1] * factor.exp()) >= best).all()


@pytest.mark.parametrize("key", ["cvi", "bbb"])
def test_methods_of_the_exact_bound_reach_the_optimum(key, toy, exact):
    rates = {"cvi": Rates((0.1, 0.002), (0.1, 0.002)), "bbb": Rates((0.05, 0.001), (0.01, 0.01), momentum=0.9)}[key]
    found = last(train(METHODS[key], toy, updates=1500, batch=None, rates=rates))
    assert (symmetric_kl(*found, *exact) < 0.15).all()


def test_vogn_with_one_example_is_closer_than_vadam_with_many(toy, exact):
    """The claim of Fig. 2."""
    rates = Rates((5e-3, 5e-4), (5e-3, 5e-4), momentum=0.9)
    distance = {}
    for key, batch in (("vogn-1", 1), ("vadam", 30)):
        distance[key] = symmetric_kl(*last(train(METHODS[key], toy, updates=3000, batch=batch, rates=rates)), *exact)
    assert (distance["vogn-1"] < 0.5 * distance["vadam"]).all()


def test_a_network_learns(toy):
    points = list(curve(LEARNERS[1], LEARNERS[1].rates[4], toy, run=0, updates=30, shown={1, 30}))
    assert points[1].negative_elbo < points[0].negative_elbo
    assert points[1].log_loss < 0.5


def test_the_rates_with_the_lowest_bound_are_chosen(toy):
    rates = [{"lr": lr} for lr in (1e-6, 0.05, 1e-5)]  # only one of them moves
    assert tuned(Learner("BBB", BBB, rates, {}), toy, run=1, updates=20) == {"lr": 0.05}


def test_one_run_has_no_standard_error():
    rows = [{"set": "toy", "method": "VOGN-1", "log_loss": values} for values in ([1.0, 2.0], [1.0])]
    assert "1.5000 ± 0.5000" in table(rows[:1])
    assert "±" not in table(rows[1:])


def test_command_writes_table_and_json(tmp_path, capsys):
    result = tmp_path / "r.json"
    main(["--sets", "toy", "--epochs", "2", "--runs", "2", "--json", str(result)])
    printed = capsys.readouterr().out
    assert all(method in printed for method in ("toy: MF-exact", "toy: VOGN-1", "toy: Vadam, M = 10"))
    rows = json.loads(result.read_text("utf-8"))["results"]
    assert [len(row["symmetric_kl"]) for row in rows] == [2, 2, 2]
    assert rows[0]["symmetric_kl"] == [0, 0]


def test_a_missing_file_is_named_with_the_way_out(tmp_path):
    with pytest.raises(DatasetError, match=r"'usps' is not at .*usps_3vs5\.npz\. Pass --root"):
        load("usps", tmp_path, 1)
