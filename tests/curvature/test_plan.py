"""What makes the units of a model be found again, and that no pass gets the reading of another."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from oracles import one_example_at_a_time, relative_error
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_bayes.curvature.fused import FusedEngine
from lightning_bayes.curvature.measured_modules import find_measured_modules
from lightning_bayes.curvature.plan import Plans
from lightning_bayes.errors import UnsupportedTrainingError


def replace(model):
    model[2] = nn.Linear(4, 4)


def parametrise(model):
    weight_norm(model[0])


def freeze(model):
    model[0].requires_grad_(False)


def override(model):
    model[0].forward = lambda x: x


def new_parameter(model):
    model[2].weight = nn.Parameter(torch.zeros(4, 4))


def evaluate(model):
    model[1].eval()


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


@pytest.mark.parametrize("change", [replace, parametrise, freeze, override, new_parameter, evaluate])
def test_a_changed_model_has_the_units_that_are_found_anew(model, change):
    plans = Plans(model)
    before = plans.plan().units
    assert plans.plan().units is before
    change(model)
    found = plans.plan().units
    assert found is not before
    assert found == find_measured_modules(model)
    assert [unit.params for unit in found] == [unit.params for unit in find_measured_modules(model)]


def test_modules_whose_parameters_are_all_left_out_are_no_units(model):
    plans = Plans(model)
    assert [unit.name for unit in plans.plan(set(model[0].parameters())).units] == ["1", "2"]
    assert [unit.name for unit in plans.plan().units] == ["0", "1", "2"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_copy_finds_the_units_of_its_own_model(model, duplicate):
    plans = Plans(model)
    plans.plan()
    copied = duplicate(plans).plan().units
    assert not {unit.module for unit in copied} & set(model.modules())
    assert len(copied) == 3


class Passes:
    """Passes of one engine. The truth of each is a loop over its examples, whose losses the pass gets as well."""

    def __init__(self, model):
        self.engine, self.model = FusedEngine(model), model

    def check(self, batch, loss, per_example):
        """Run a pass with a loss of the batch, and compare it with the losses of its examples."""
        with self.engine.capture() as captured:
            value = loss(*batch)
            captured.observe(value)
            value.backward()
        captured.close()
        found = captured.mean_curvature()
        named = {name: p for name, p in self.model.named_parameters() if p in found}
        grads = {name: p.grad * captured.gradient_factor for name, p in named.items()}
        examples = [tuple(x[i : i + 1] for x in batch) for i in range(len(batch[0]))]
        counted = [each for each in examples if per_example(*each).requires_grad]
        grad, square = one_example_at_a_time(self.model, counted, lambda model, each: per_example(*each))
        assert captured.num_examples == len(counted)
        assert relative_error(grads, {name: grad[name] for name in grads}) < 1e-9
        assert relative_error({name: found[p] for name, p in named.items()}, {n: square[n] for n in named}) < 1e-9
        self.model.zero_grad()
        return captured

    @property
    def num_readings(self):
        return sum(len(plan.readings) for plan in self.engine.plans._plans.values())


class Branches(nn.Module):
    """Two networks with outputs of one shape, and dropout that a test can turn off."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.second = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x):
        return self.first(x)


@pytest.fixture
def passes():
    torch.manual_seed(0)
    return Passes(Branches().double())


@pytest.fixture
def draw(generator):
    def batch(n=6):
        x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
        return x, torch.randint(3, (n,), generator=generator)

    return batch


def mean(passes):
    return lambda x, y: F.cross_entropy(passes.model(x), y)


def total(passes):
    return lambda x, y: F.cross_entropy(passes.model(x), y, reduction="sum")


def test_the_second_pass_of_a_kind_reads_nothing(passes, draw, monkeypatch):
    passes.check(draw(), mean(passes), mean(passes))
    monkeypatch.setattr("lightning_bayes.curvature.loss_reader.LossReader.read", None)
    passes.check(draw(), mean(passes), mean(passes))
    assert passes.num_readings == 1


@pytest.mark.parametrize("order", [(0, 1, 0, 1), (1, 1, 0, 0)])
def test_a_loss_with_another_reduction_is_read_anew(passes, draw, order):
    kinds = [mean, total]
    for kind in order:
        captured = passes.check(draw(), kinds[kind](passes), mean(passes))
        assert captured.scale.reduction == ("mean", "sum")[kind]


@pytest.mark.parametrize("numbers", [(6, 6, 12, 3, 6), (3, 12, 12, 3)])
def test_a_sum_divided_by_a_number_is_read_by_the_number(passes, draw, numbers):
    for number in numbers:
        by_hand = lambda x, y, d=number: F.cross_entropy(passes.model(x), y, reduction="sum") / d  # noqa: E731
        with passes.engine.capture() as captured:
            loss = by_hand(*draw())
            if number == 6:
                captured.observe(loss)
                assert captured.scale.reduction == "mean"
            else:
                with pytest.raises(UnsupportedTrainingError, match="rescaled"):
                    captured.observe(loss)


def test_a_divisor_in_a_tensor_is_read_in_every_pass(passes, draw):
    for divisor in (6.0, 6.0, 5.0):
        with passes.engine.capture() as captured:
            x, y = draw()
            loss = F.cross_entropy(passes.model(x), y, reduction="none").sum() / torch.tensor(divisor)
            if divisor == 6.0:
                captured.observe(loss)
                assert captured.scale.reduction == "mean"
            else:
                with pytest.raises(UnsupportedTrainingError):
                    captured.observe(loss)
    assert not passes.num_readings


def test_batches_of_other_sizes_and_a_last_partial_batch_are_counted(passes, draw):
    for n in (6, 6, 4, 6, 1, 2, 4):
        passes.check(draw(n), mean(passes), mean(passes))


def test_losses_of_two_networks_take_turns(passes, draw):
    second = lambda x, y: F.cross_entropy(passes.model.second(x), y)  # noqa: E731
    for each in (mean(passes), second, mean(passes), second):
        captured = passes.check(draw(), each, each)
        assert {label.split(".")[0] for label in captured.sizes} <= {"first", "second"}


def test_a_loss_of_one_of_two_networks_that_ran_reaches_only_this_one(passes, draw):
    def loss_of(which):
        def loss(x, y):
            outputs = passes.model.first(x), passes.model.second(x)
            return F.cross_entropy(outputs[which], y)

        return loss

    for which in (0, 1, 1, 0):
        passes.check(draw(), loss_of(which), loss_of(which))


def test_networks_that_train_in_turn_have_their_own_plans(passes, draw):
    sides = [passes.model.first, passes.model.second]

    def loss(x, y):
        return F.cross_entropy(sides[0](x) + sides[1](x), y)

    for turn in (0, 1, 0, 1, 1):
        sides[turn].requires_grad_(True)
        sides[1 - turn].requires_grad_(False)
        captured = passes.check(draw(), loss, loss)
        assert set(captured.squares) == set(sides[turn].parameters())


def test_two_forwards_of_a_pass_are_followed(passes, draw):
    def twice(x, y):
        return F.cross_entropy(passes.model(x) + passes.model(-x), y)

    for each in (mean(passes), twice, twice, mean(passes)):
        passes.check(draw(), each, each)


def test_class_weights_may_change_in_place(passes, draw):
    weights = torch.ones(3, dtype=torch.float64)
    loss = lambda x, y: F.cross_entropy(passes.model(x), y, weight=weights, reduction="sum")  # noqa: E731
    for factor in (1.0, 0.5, 3.0):
        weights[1] *= factor
        passes.check(draw(), loss, loss)


def test_ignored_targets_are_counted_in_every_pass(passes, draw):
    def own(x, y):  # an ignored example has no loss
        return F.cross_entropy(passes.model(x), y) if int(y) >= 0 else torch.zeros(())

    for ignored in ([], [], [1], [0, 2, 3], []):
        x, y = draw()
        y[ignored] = -100
        passes.check((x, y), mean(passes), own)


def test_rows_chosen_by_a_tensor_are_read_in_every_pass(passes, draw):
    def loss(x, y, rows):
        return F.mse_loss(passes.model(x)[rows], torch.zeros(len(rows), 3, dtype=torch.float64))

    x, y = draw()
    with passes.engine.capture() as captured:
        captured.observe(loss(x, y, torch.arange(6).flip(0)))
    assert captured.scale.reduction == "mean"
    with passes.engine.capture() as captured, pytest.raises(UnsupportedTrainingError, match="chosen rows"):
        captured.observe(loss(x, y, torch.tensor([0, 1, 2, 2, 1, 0])))


def test_evaluation_mode_is_another_kind(draw):
    torch.manual_seed(0)
    passes = Passes(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double())
    for training in (True, False, True, False):
        passes.model.train(training)
        loss = mean(passes)
        if training:  # which has no loss of one example
            with passes.engine.capture() as captured:
                captured.observe(value := loss(*draw()))
                value.backward()
            assert captured.num_examples == 6
            passes.model.zero_grad()
        else:
            passes.check(draw(), loss, loss)


class Positions(nn.Module):
    """A layer that sees the positions or the examples first."""

    def __init__(self):
        super().__init__()
        self.layer, self.head, self.batch_first = nn.Linear(4, 4), nn.Linear(4, 3), True

    def forward(self, x):
        columns = torch.stack([x, x.square()], 1 if self.batch_first else 0)
        return self.head(self.layer(columns).tanh().sum(1 if self.batch_first else 0))


def test_a_module_replaced_in_the_middle_of_a_fit_is_measured(draw):
    torch.manual_seed(0)
    passes = Passes(nn.Sequential(nn.Linear(4, 4), Positions(), nn.Linear(3, 3)).double())
    for change in (None, None, "layer", "positions", "forward"):
        if change == "layer":
            passes.model[0] = nn.Linear(4, 4).double()
        elif change == "positions":
            passes.model[1] = Positions().double()
            passes.model[1].batch_first = False
        elif change == "forward":
            passes.model[2].forward = lambda x, layer=passes.model[2]: F.linear(x, layer.weight, layer.bias)
            passes.model[2].register_forward_hook(lambda module, args, output: 2 * output)
        for _ in range(2):
            passes.check(draw(), mean(passes), mean(passes))


def test_a_hook_that_moves_the_examples_is_seen(draw):
    torch.manual_seed(0)
    passes = Passes(Positions().double())
    passes.check(draw(2), mean(passes), mean(passes))
    passes.model.layer.register_forward_pre_hook(lambda module, args: (args[0].transpose(0, 1),))
    passes.model.layer.register_forward_hook(lambda module, args, output: output.transpose(0, 1))
    passes.check(draw(2), mean(passes), mean(passes))


def test_plans_and_readings_do_not_pile_up(passes, draw):
    for n in range(1, 90):
        with passes.engine.capture() as captured:
            captured.observe(mean(passes)(*draw(n)))
    assert passes.num_readings == 64
    for _ in range(5):
        passes.model.first[0] = nn.Linear(4, 5).double()
        passes.engine.plans.plan()
    assert len(passes.engine.plans._plans) == 1
