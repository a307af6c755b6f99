"""The UCI benchmark: its written-out derivatives against autograd, its scores against torch.distributions, its resuming."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, Normal

from benchmarks.papers import PUBLISHED
from benchmarks.papers.regression.data import ZHANG as SETTING
from benchmarks.papers.regression.data import Batch, Splits, epoch_of, load_splits
from benchmarks.papers.regression.learner import Learner, Problem, evaluate
from benchmarks.papers.regression.network import (
    fisher_blocks,
    forward,
    initial_weights,
    mean_gradient,
    mean_square_gradient,
    unflatten,
)
from benchmarks.papers.uci import METHODS, SETS, main, promises, table, within

R, B, D, H = 2, 5, 3, 4
F64 = torch.float64


@pytest.fixture
def network(generator):
    weights = initial_weights(R, D + 1, H, generator)
    inputs = torch.nn.functional.pad(torch.randn(R, B, D, generator=generator), (0, 1), value=1.0)
    return type(weights)(*(matrix.double() for matrix in weights)), inputs.double()


def plain_output(weights, split, x):
    return weights.output[split, 0] @ torch.cat([(weights.hidden[split] @ x).relu(), torch.ones(1, dtype=F64)])


def jacobian(weights, inputs, split, example):
    """∂f/∂W₁ and ∂f/∂w₂ of one example by autograd."""
    leaves = type(weights)(*(matrix.clone().requires_grad_() for matrix in weights))
    plain_output(leaves, split, inputs[split, example]).backward()
    return type(weights)(*(leaf.grad[split] for leaf in leaves))


def test_gradients_and_squares_equal_a_loop_of_autograd(network, generator):
    weights, inputs = network
    output_gradients = torch.randn(R, B, generator=generator, dtype=F64)
    trace = forward(weights, inputs)
    for split in range(R):
        each = [jacobian(weights, inputs, split, i) for i in range(B)]
        for layer in range(2):
            grads = torch.stack([output_gradients[split, i] * each[i][layer] for i in range(B)])
            got = mean_gradient(weights, trace, output_gradients)[layer][split]
            squares = mean_square_gradient(weights, trace, output_gradients)[layer][split]
            torch.testing.assert_close(got, grads.mean(0))
            torch.testing.assert_close(squares, grads.square().mean(0))


def test_the_blocks_are_the_fisher_of_one_example(network):
    """With one example S ⊗ A is τ J Jᵀ, also between the layers."""
    weights, inputs = network
    precision = torch.tensor([2.0, 3.0], dtype=F64)
    blocks = fisher_blocks(weights, forward(weights, inputs[:, :1]), precision)
    for split in range(R):
        first, second = (part.flatten() for part in jacobian(weights, inputs, split, 0))
        expected = [torch.outer(first, first), torch.outer(second, second), torch.outer(first, second)]
        for block, truth in zip(blocks, expected, strict=True):
            torch.testing.assert_close(block.dense()[split], precision[split] * truth)


def test_joined_weights_come_apart_again(network):
    weights, _ = network
    for got, matrix in zip(unflatten(weights.flat(), H, D + 1), weights, strict=True):
        assert torch.equal(got, matrix)


def write_set(folder, name="yacht", rows=60, splits=3):
    """A noisy line in two inputs, in units of hundreds."""
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(rows, 2))
    targets = 100 * (inputs @ [1.0, -2.0] + 0.1 * generator.normal(size=rows)) + 500
    orders = [generator.permutation(rows) for _ in range(splits)]
    arrays = {f"train_{i}": order[6:] for i, order in enumerate(orders)}
    arrays |= {f"test_{i}": order[:6] for i, order in enumerate(orders)}
    data = np.column_stack([inputs, targets])
    np.savez(folder / f"{name}.npz", data=data, index_features=[0, 1], index_target=2, n_splits=splits, **arrays)


@pytest.fixture
def root(tmp_path):
    write_set(tmp_path)
    return tmp_path


def test_splits_are_stacked_and_standardised_by_their_own_training_rows(root):
    splits = load_splits(root, "yacht")
    assert splits.train.inputs.shape == (3, 54, 3)
    assert splits.test.targets.shape == (3, 6)
    assert splits.num_data == 54
    torch.testing.assert_close(splits.train.inputs[..., :2].mean(1), torch.zeros(3, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(splits.train.targets.std(1, correction=0), torch.ones(3))
    assert (splits.train.inputs[..., 2] == 1).all()


def test_an_epoch_sees_every_row_once_and_pairs_inputs_with_targets(root, generator):
    train = load_splits(root, "yacht").train
    batches = list(epoch_of(train, 10, generator))
    assert [batch.targets.shape[1] for batch in batches] == [10] * 5 + [4]
    inputs, targets = (torch.cat(part, 1) for part in zip(*batches, strict=True))
    for split in range(3):
        order = [int((train.targets[split] == target).nonzero()[0, 0]) for target in targets[split]]
        assert sorted(order) == list(range(54))
        assert torch.equal(inputs[split], train.inputs[split][order])


class Rehearsed(Learner):
    """Predicts given outputs, one after the other."""

    def __init__(self, problem, outputs):
        super().__init__(problem)
        self.outputs = iter(outputs)

    def step(self, batch, lr):
        raise AssertionError

    def predict(self, inputs):
        return next(self.outputs)


class Known:
    """A known noise precision."""

    def __init__(self, tau):
        self.tau = tau[:, None]

    def log_density(self, residuals):
        return Normal(0.0, self.tau.rsqrt()).log_prob(residuals)


def test_scores_are_those_of_the_mixture_in_the_datas_own_units(generator):
    outputs, targets = torch.randn(7, R, B, generator=generator), torch.randn(R, B, generator=generator)
    unit, tau = torch.tensor([10.0, 0.1]), torch.tensor([4.0, 9.0])
    test = Batch(torch.ones(R, B, 1), targets)
    problem = Problem.of(Splits(test, test, unit), SETTING, seed=0)
    problem.setting = SETTING.__class__(**{**vars(SETTING), "eval_samples": 7})
    problem.noise = Known(tau)
    scores = evaluate(Rehearsed(problem, outputs))
    for split in range(R):
        components = Normal(outputs[:, split].T * unit[split], unit[split] / tau[split].sqrt())
        truth = MixtureSameFamily(Categorical(torch.ones(B, 7)), components).log_prob(targets[split] * unit[split])
        torch.testing.assert_close(scores.log_likelihood[split], truth.mean())
        error = (outputs[:, split].mean(0) - targets[split]) * unit[split]
        torch.testing.assert_close(scores.rmse[split], error.square().mean().sqrt())


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_a_line(root, method):
    """The targets' standard deviation is about 220, that of the noise 10."""
    splits = load_splits(root, "yacht")
    setting = SETTING.at_most(splits.num_data, epochs=40, mc_samples=2)
    with torch.no_grad():
        scores = METHODS[method].run(splits, setting)
    assert scores.rmse.shape == scores.log_likelihood.shape == (3,)
    assert scores.rmse.max() < 150
    assert scores.log_likelihood.isfinite().all()


def test_splits_do_not_mix(root):
    """Other targets in the last split change nothing in the first."""
    splits = load_splits(root, "yacht")
    changed = splits.train.targets.clone()
    changed[2] = changed[2].flip(0)
    other = splits._replace(train=Batch(splits.train.inputs, changed))
    setting = SETTING.at_most(54, epochs=2, mc_samples=1)
    with torch.no_grad():
        one, two = (METHODS["noisy_kfac"].run(data, setting).rmse for data in (splits, other))
    torch.testing.assert_close(one[:2], two[:2])
    assert one[2] != two[2]


def row(name, method, *values):
    run = {"rmse": [1.0, 2.0], "seconds": 3.0, "epochs": 7, "mc_samples": 1, "splits": 2}
    return {"set": name, "method": method, "log_likelihood": list(values), **run}


def test_promises_count_sets():
    zhang = PUBLISHED["zhang2018_table1"]["log_likelihood"]["noisy_kfac"]
    rows = [row(name, "noisy_kfac", *(zhang[name][0] + noise for noise in (-0.01, 0.0, 0.01))) for name in SETS]
    rows += [{**each, "method": "bbb"} for each in rows] + [row(name, "noisy_adam", -9.0, -9.1) for name in SETS]
    adam, fisher, bbb, published = promises(rows)
    assert adam.startswith("kept: Noisy K-FAC's log-likelihood is better than that of Noisy Adam on 8 of 8")
    assert fisher.startswith("not measured on all sets")
    assert bbb.startswith("BROKEN")
    assert published.startswith("kept: it is within two standard errors")
    *_, alone = promises([row(name, "noisy_kfac", 0.0) for name in SETS])  # one split has no standard error
    assert alone.startswith("not measured on all sets")


def test_within_counts_both_errors():
    theirs = PUBLISHED["zhang2018_table1"]["log_likelihood"]["noisy_kfac"]["boston"]
    assert tuple(theirs) == (-2.446, 0.029)
    edge = 2 * math.hypot(0.03, 0.029)
    assert within((-2.446 - edge + 1e-6, 0.03), theirs)
    assert not within((-2.446 - edge - 1e-6, 0.03), theirs)


def test_the_table_has_the_longest_run_beside_the_published_values():
    rows = [{**row("yacht", "bbb", -1.0, -2.0), "epochs": epochs} for epochs in (7, 90, 8)]
    (line,) = [line.split(" | ") for line in table(rows).splitlines() if line.startswith("| yacht")]
    assert line[1:4] == ["BBB", "1.500 ± 0.500", "1.174 ± 0.086"]
    assert line[-3] == "90"


def test_a_run_goes_on_where_it_ended(root, tmp_path, capsys):
    result = tmp_path / "uci.json"
    common = ["--root", str(root), "--sets", "yacht", "--mc-samples", "1", "--json", str(result)]
    main([*common, "--epochs", "1", "--methods", "noisy_adam"])
    before = json.loads(result.read_text())["results"]
    main([*common, "--epochs", "1", "--methods", "noisy_adam", "noisy_kfac"])
    main([*common, "--steps", "12", "--methods", "noisy_adam"])  # 54 rows in batches of 10: two epochs
    after = json.loads(result.read_text())["results"]
    assert after[0] == before[0]
    assert [(each["method"], each["epochs"]) for each in after] == [
        ("noisy_adam", 1),
        ("noisy_kfac", 1),
        ("noisy_adam", 2),
    ]


def test_limits_shorten_the_published_setting():
    assert SETTING.at_most(455) == SETTING
    small, large = SETTING.at_most(455, steps=1000), SETTING.at_most(8000, steps=1000, mc_samples=3)
    assert (small.epochs, small.batch_for(455), small.samples_for(455)) == (22, 10, 10)  # 46 steps an epoch
    assert (large.epochs, large.batch_for(8000), large.samples_for(8000)) == (13, 100, 3)  # 80
