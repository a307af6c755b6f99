"""What ĝ² measures (Khan et al. 2018, Theorem 1), by enumeration of minibatches; and the warning if it is no curvature."""

from __future__ import annotations

import warnings
from itertools import combinations, product

import pytest
import torch
from optimizer_family import half_squares, train_on
from torch import nn

from lightning_bayes.optim import VOGN, Vadam, Vprop

F64 = torch.float64
EXAMPLES = 6


@pytest.fixture
def data(generator):
    x = torch.randn(EXAMPLES, 3, generator=generator, dtype=F64)
    return x, torch.randn(EXAMPLES, 1, generator=generator, dtype=F64)


@pytest.fixture
def model():
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.ones_(model.weight)
    return model


def measured(optimizer, model, data, rows):
    """ĥ of one batch at the mean: without an initial precision the first pass has no noise."""
    opt = optimizer(model, lr=0.0, betas=(0.0, 0.0), num_data=100)
    train_on(opt, lambda: half_squares(model, data[0][list(rows)], data[1][list(rows)]))
    return opt.state[model.weight]["curvature"][0]


def truth(model, data):
    """Mean of squared gradients, and square of the mean gradient, in closed form."""
    x, y = data
    each = x * (model(x) - y).detach()
    return each.square().mean(0), each.mean(0).square()


@pytest.mark.parametrize("size", range(1, EXAMPLES + 1))
def test_mean_over_all_minibatches_is_that_of_theorem_1(size, model, data):
    squares, square = truth(model, data)
    found = torch.stack([measured(Vadam, model, data, rows) for rows in combinations(range(EXAMPLES), size)]).mean(0)
    w = (EXAMPLES - size) / (size * (EXAMPLES - 1))
    torch.testing.assert_close(found, w * squares + (1 - w) * square, rtol=1e-12, atol=1e-14)


def test_with_replacement_the_weight_is_one_over_the_batch_size(model, data):
    squares, square = truth(model, data)
    found = torch.stack([measured(Vadam, model, data, rows) for rows in product(range(EXAMPLES), repeat=2)]).mean(0)
    torch.testing.assert_close(found, squares / 2 + square / 2, rtol=1e-12, atol=1e-14)


def test_batches_of_one_measure_what_vogn_measures(model, data):
    """The batch of all data measures the square of its gradient; VOGN's measurement does not change."""
    every = range(EXAMPLES)
    of_ones = torch.stack([measured(Vadam, model, data, [row]) for row in every]).mean(0)
    torch.testing.assert_close(of_ones, measured(VOGN, model, data, every), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(measured(Vadam, model, data, every), truth(model, data)[1], rtol=1e-12, atol=1e-14)


def test_micro_batches_add_up_before_the_square_and_weight_samples_after(model, data):
    """Passes with the same noise form one batch; passes with different noise are averaged after squaring."""
    x, y = data

    def curvature(passes):
        opt = Vadam(model, lr=0.0, betas=(0.0, 0.0), num_data=100)
        for sample, rows in passes:
            with opt.sampled_params(sample):
                half_squares(model, x[rows], y[rows]).backward()
        opt.step()
        return opt.state[model.weight]["curvature"][0]

    one, two = slice(0, 4), slice(4, 6)
    torch.testing.assert_close(curvature([(0, one), (0, two)]), measured(Vadam, model, data, range(6)))
    parts = [measured(Vadam, model, data, range(6)[rows]) for rows in (one, two)]
    torch.testing.assert_close(curvature([(0, one), (1, two)]), (4 * parts[0] + 2 * parts[1]) / 6)


def train(opt, model, data, rows, steps=3):
    train_on(opt, lambda: half_squares(model, data[0][rows], data[1][rows]), steps)


@pytest.mark.parametrize("optimizer", [Vadam, Vprop])
def test_a_batch_of_all_data_is_warned_of_once(optimizer, model, data):
    opt = optimizer(model, num_data=EXAMPLES)
    with pytest.warns(UserWarning, match=rf"{optimizer.__name__} .* batch holds all 6 examples") as caught:
        train(opt, model, data, slice(None))
    assert len(caught) == 1


def test_a_single_update_may_be_a_dry_run_and_is_not_warned_of(model, data):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(Vadam(model, num_data=EXAMPLES), model, data, slice(None), steps=1)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 5)])
def test_smaller_batches_are_not_warned_of(rows, model, data):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(Vadam(model, num_data=EXAMPLES), model, data, rows)


def test_weight_samples_do_not_count_as_examples(model, data):
    """Three samples of a batch of two count six examples, but are not the whole data set."""
    opt = Vadam(model, num_data=EXAMPLES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sample in range(3):
            with opt.sampled_params(sample):
                half_squares(model, data[0][:2], data[1][:2]).backward()
        opt.step()
