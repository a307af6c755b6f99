"""The UCI benchmark: its written-out derivatives against autograd, its scores against torch.distributions, its resuming."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, Normal

from benchmarks.papers.uci.__main__ import main
from benchmarks.papers.uci.data import Batch, Splits, epoch_of, load_splits
from benchmarks.papers.uci.learner import Learner, Problem, Scores, evaluate
from benchmarks.papers.uci.methods import METHODS
from benchmarks.papers.uci.network import (
    fisher_blocks,
    forward,
    initial_weights,
    mean_gradient,
    mean_square_gradient,
    unflatten,
)
from benchmarks.papers.uci.noise import KnownPrecision
from benchmarks.papers.uci.published import KHAN, SETS, ZHANG
from benchmarks.papers.uci.report import promises, within
from benchmarks.papers.uci.setting import ZHANG as SETTING
from benchmarks.papers.uci.show import main as show
from benchmarks.papers.uci.tuning import tuned

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


def test_the_gradient_through_dropout_equals_autograds(network, generator):
    weights, inputs = network
    output_gradients = torch.randn(R, B, generator=generator, dtype=F64)
    mask = 2.0 * torch.randint(2, (R, B, H + 1), generator=generator).double()
    leaves = type(weights)(*(matrix.clone().requires_grad_() for matrix in weights))
    hidden = torch.nn.functional.pad((inputs @ leaves.hidden.mT).relu(), (0, 1), value=1.0) * mask
    ((hidden @ leaves.output.mT)[..., 0] * output_gradients).mean(1).sum().backward()
    trace = forward(weights, inputs)._replace(hidden=hidden.detach())
    got = mean_gradient(weights, trace, output_gradients, mask)
    for grad, leaf in zip(got, leaves, strict=True):
        torch.testing.assert_close(grad, leaf.grad)


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


def test_blocks_of_several_samples_are_averaged(network):
    weights, inputs = network
    pair = type(weights)(*(torch.stack([matrix, -0.5 * matrix]) for matrix in weights))
    precision = torch.ones(R, dtype=F64)
    both = fisher_blocks(pair, forward(pair, inputs), precision)
    singles = [type(weights)(*(matrix[k] for matrix in pair)) for k in range(2)]
    each = [fisher_blocks(single, forward(single, inputs), precision) for single in singles]
    for got, one, two in zip(both, *each, strict=True):
        for factor, first, second in zip(got, one, two, strict=True):
            torch.testing.assert_close(factor, (first + second) / 2)


def test_joined_weights_come_apart_again(network):
    weights, _ = network
    for got, matrix in zip(unflatten(weights.flat(), H, D + 1), weights, strict=True):
        assert torch.equal(got, matrix)


# -- data ---------------------------------------------------------------------------------------------------------------


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


def test_what_is_held_out_comes_from_the_training_rows(root):
    splits = load_splits(root, "yacht")
    held = splits.held_out()
    assert held.num_data == 43
    both = torch.cat([held.train.targets, held.test.targets], 1)
    assert torch.equal(both, splits.train.targets)


def test_an_epoch_sees_every_row_once_and_pairs_inputs_with_targets(root, generator):
    train = load_splits(root, "yacht").train
    batches = list(epoch_of(train, 10, generator))
    assert [batch.targets.shape[1] for batch in batches] == [10] * 5 + [4]
    inputs, targets = (torch.cat(part, 1) for part in zip(*batches, strict=True))
    for split in range(3):
        order = [int((train.targets[split] == target).nonzero()[0, 0]) for target in targets[split]]
        assert sorted(order) == list(range(54))
        assert torch.equal(inputs[split], train.inputs[split][order])


# -- scores -------------------------------------------------------------------------------------------------------------


class Rehearsed(Learner):
    """Predicts given outputs, one after the other."""

    def __init__(self, problem, outputs):
        super().__init__(problem)
        self.outputs = iter(outputs)

    def step(self, batch, lr):
        raise AssertionError

    def predict(self, inputs):
        return next(self.outputs)


def test_scores_are_those_of_the_mixture_in_the_datas_own_units(generator):
    outputs, targets = torch.randn(7, R, B, generator=generator), torch.randn(R, B, generator=generator)
    unit, tau = torch.tensor([10.0, 0.1]), torch.tensor([4.0, 9.0])
    test = Batch(torch.ones(R, B, 1), targets)
    problem = Problem.of(Splits(test, test, unit), SETTING, seed=0)
    problem.setting = SETTING.__class__(**{**vars(SETTING), "eval_samples": 7})
    problem.noise = KnownPrecision(tau)
    (scores,) = evaluate(Rehearsed(problem, outputs))
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
    setting = METHODS[method].setting.at_most(splits.num_data, epochs=40, mc_samples=2)
    with torch.no_grad():
        scores = METHODS[method].run("yacht", splits, setting)
    assert scores.rmse.shape == scores.log_likelihood.shape == (3,)
    assert scores.rmse.max() < 150
    assert scores.log_likelihood.isfinite().all()


def test_splits_do_not_mix(root):
    """Other targets in the last split change nothing in the first."""
    splits = load_splits(root, "yacht")
    changed = splits.train.targets.clone()
    changed[2] = changed[2].flip(0)
    other = splits._replace(train=Batch(splits.train.inputs, changed))
    setting = METHODS["noisy_kfac"].setting.at_most(54, epochs=2, mc_samples=1)
    with torch.no_grad():
        one, two = (METHODS["noisy_kfac"].run("yacht", data, setting).rmse for data in (splits, other))
    torch.testing.assert_close(one[:2], two[:2])
    assert one[2] != two[2]


def test_each_split_gets_its_own_best_option_and_way(root):
    splits = load_splits(root, "yacht")
    numbers = torch.arange(3.0)

    def fit(part, option):  # which split it is can be read from the number of its unit
        which = torch.stack([(splits.target_std == unit).nonzero()[0, 0] for unit in part.target_std]).float()
        return [
            Scores(100 * which + 10 * option + way, -(which - option).abs() - 0.1 * abs(way - 1)) for way in range(3)
        ]

    chosen = tuned(splits, [0, 2, 1], fit)
    torch.testing.assert_close(chosen.rmse, 110 * numbers + 1)


# -- the report and the program -----------------------------------------------------------------------------------------


def test_published_figures_are_where_the_papers_print_them():
    assert ZHANG["noisy_kfac"]["boston"].log_likelihood == (-2.446, 0.029)
    assert ZHANG["bbb"]["yacht"].rmse == (1.174, 0.086)
    assert KHAN["vadam"]["naval"].log_likelihood == (4.72, 0.22)
    assert all(set(table[method]) == set(SETS) for table in (ZHANG, KHAN) for method in table)


def test_promises_count_sets():
    rows = [
        {"set": name, "method": method, "log_likelihood": [level + noise for noise in (-0.01, 0.0, 0.01)]}
        for name in SETS
        for method, level in (("noisy_kfac", ZHANG["noisy_kfac"][name].log_likelihood[0]), ("noisy_adam", -9.0))
    ]
    rows += [{**row, "method": "bbb"} for row in rows if row["method"] == "noisy_kfac"]
    adam, fisher, bbb, zhang = promises(rows)
    assert adam.startswith("kept: Noisy K-FAC's log-likelihood is better than that of Noisy Adam on 8 of 8")
    assert fisher.startswith("not measured on all sets")
    assert bbb.startswith("BROKEN")
    assert bbb.endswith("not on boston, concrete, energy, kin8nm, naval, power, wine, yacht")
    assert zhang.startswith("kept: it is within two standard errors")


def test_one_split_is_not_compared_with_the_published_values():
    rows = [{"set": name, "method": "noisy_kfac", "log_likelihood": [0.0]} for name in SETS]
    *_, zhang = promises(rows)
    assert zhang.startswith("not measured on all sets: it is within two standard errors (both combined)")


def test_within_counts_both_errors():
    theirs = ZHANG["noisy_kfac"]["boston"]
    edge = 2 * math.hypot(0.03, 0.029)
    assert within((-2.446 - edge + 1e-6, 0.03), theirs)
    assert not within((-2.446 - edge - 1e-6, 0.03), theirs)
    assert within((0.0, 0.03), theirs)


def test_a_run_goes_on_where_it_ended(root, tmp_path, capsys):
    result, plot = tmp_path / "uci.json", tmp_path / "uci.png"
    common = ["--root", str(root), "--sets", "yacht", "--epochs", "1", "--mc-samples", "1", "--json", str(result)]
    main([*common, "--methods", "noisy_adam"])
    before = json.loads(result.read_text())["results"]
    main([*common, "--methods", "noisy_adam", "noisy_kfac", "--plot", str(plot)])
    after = json.loads(result.read_text())["results"]
    assert after[0] == before[0]
    assert [row["method"] for row in after] == ["noisy_adam", "noisy_kfac"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("yacht, Noisy Adam:") for line in lines) == 1
    assert any("-2.316 ± 0.006" in line for line in lines)


def test_limits_shorten_the_published_setting():
    assert SETTING.at_most(455) == SETTING
    small, large = SETTING.at_most(455, steps=1000), SETTING.at_most(8000, steps=1000, mc_samples=3)
    assert (small.epochs, small.batch_for(455), small.samples_for(455)) == (22, 10, 10)  # 46 steps an epoch
    assert (large.epochs, large.batch_for(8000), large.samples_for(8000)) == (13, 100, 3)  # 80
    assert SETTING.at_most(455, epochs=5, steps=1000).epochs == 5


def test_another_number_of_epochs_is_another_result(root, tmp_path):
    result = tmp_path / "uci.json"
    common = [
        "--root",
        str(root),
        "--sets",
        "yacht",
        "--methods",
        "noisy_adam",
        "--mc-samples",
        "1",
        "--json",
        str(result),
    ]
    for limit in (["--epochs", "1"], ["--steps", "12"]):  # 54 rows in batches of 10
        main([*common, *limit])
    assert [row["epochs"] for row in json.loads(result.read_text())["results"]] == [1, 2]


def test_of_several_runs_the_longest_is_shown(tmp_path, capsys):
    scores = {"rmse": [1.0, 2.0], "log_likelihood": [-1.0, -2.0], "seconds": 3.0, "mc_samples": 1, "splits": 2}
    rows = [{"set": "yacht", "method": "bbb", "epochs": epochs, **scores} for epochs in (7, 90, 8)]
    result = tmp_path / "uci.json"
    result.write_text(json.dumps({"results": rows}))
    show([str(result), "--markdown", "--plot", str(tmp_path / "uci.svg")])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| yacht")]
    (cells,) = [line.split(" | ") for line in lines]
    assert cells[1:4] == ["BBB", "1.500 ± 0.500", "1.174 ± 0.086"]
    assert cells[-3] == "90"
    assert (tmp_path / "uci.svg").exists()
