"""Hyperparameters that are functions of the number of updates."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import train_on, weights
from torch import nn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim import VOGN, CosineSchedule, ExponentialSchedule, LinearSchedule, PiecewiseSchedule


@pytest.fixture
def problem(generator):
    return torch.randn(16, 3, generator=generator), torch.randn(16, 1, generator=generator)


def build(**arguments):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, VOGN(model, num_data=160, init_precision=200.0, **{"lr": 0.1, **arguments})


def train(model, opt, problem, steps, before_step=lambda step: None):
    for step in range(steps):
        before_step(step)
        train_on(opt, lambda: F.mse_loss(model(problem[0]), problem[1]))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("lr", lambda t: 0.1 / (1 + t) ** 0.55),
        ("betas", lambda t: (0.9, 1 - 1 / (t + 2))),
        ("kl_weight", LinearSchedule(0.1, 1.0, 5)),
        ("prior_precision", ExponentialSchedule(10.0, 0.5, 2)),
        ("damping", CosineSchedule(1.0, 0.0, 5)),
        ("data_augmentation_factor", PiecewiseSchedule([1.0, 5.0], [3])),
        ("relative_noise", LinearSchedule(0.1, 0.3, 5)),
        ("max_noise", LinearSchedule(0.01, 0.03, 5)),
    ],
)
def test_a_function_equals_its_values_set_by_hand(name, function, problem):
    scheduled, opt = build(**{name: function})
    train(scheduled, opt, problem, 7)
    by_hand, other = build(**{name: function(0)})
    place = other.param_groups[0] if name == "lr" else other.param_groups[0]["posterior"]

    def set_by_hand(step):
        place[name] = function(step)
        other.refresh_noise()

    train(by_hand, other, problem, 7, set_by_hand)
    assert torch.equal(weights(scheduled), weights(by_hand))
    plain, constant = build(**{name: function(0)})
    train(plain, constant, problem, 7)
    assert not torch.equal(weights(scheduled), weights(plain))


def test_a_value_set_by_hand_reaches_the_noise_at_the_next_refresh(problem):
    """1/Σ = Ñ s/τ + δ."""
    model, opt = build()
    train(model, opt, problem, 3)
    before = opt.posterior().precision["weight"]
    opt.param_groups[0]["posterior"]["prior_precision"] = 11.0
    assert torch.equal(opt.posterior().precision["weight"], before)
    opt.refresh_noise()
    torch.testing.assert_close(opt.posterior().precision["weight"], before + 10)


def test_the_posterior_has_the_value_after_the_update(problem):
    model, opt = build(kl_weight=LinearSchedule(0.5, 1.0, 2))
    train(model, opt, problem, 2)
    assert opt.param_groups[0]["posterior"]["kl_weight"] == 1.0


def test_groups_have_their_own(problem):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    groups = [{"params": [model.weight], "damping": lambda t: float(t)}, {"params": [model.bias]}]
    opt = VOGN(model, groups, lr=0.1, num_data=160)
    train(model, opt, problem, 3)
    assert [group["posterior"]["damping"] for group in opt.param_groups] == [3.0, 0.0]


def test_resume_continues_the_schedule(problem):
    model, opt = build(kl_weight=LinearSchedule(0.1, 1.0, 6))
    train(model, opt, problem, 3)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    train(model, opt, problem, 3)
    other, resumed = build(kl_weight=LinearSchedule(0.1, 1.0, 6))
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(other, resumed, problem, 3)
    assert torch.equal(weights(model), weights(other))


@pytest.mark.parametrize("last", [-0.25, None])
def test_a_value_outside_of_its_range_stops_when_it_appears(problem, last):
    model, opt = build(damping=lambda t: [0.5, 0.25, 0.0, last][t])
    train(model, opt, problem, 2)
    message = rf"^damping={last} must be at least 0\. A function of the step returned this value at step 3\.$"
    with pytest.raises(HyperparameterError, match=message):
        train(model, opt, problem, 1)
    assert opt.param_groups[0]["posterior"]["damping"] == 0.0  # a checkpoint of the interrupted run stays readable


def test_what_cannot_change_is_refused_by_name():
    with pytest.raises(HyperparameterError, match=r"^seed cannot be a function of the step\. Only betas, "):
        build(seed=lambda t: t)


def test_bad_schedules_are_refused():
    with pytest.raises(HyperparameterError, match="steps=0 must be a whole number of at least 1"):
        LinearSchedule(0.0, 1.0, 0)
    with pytest.raises(HyperparameterError, match="do not match"):
        PiecewiseSchedule([1.0], [1])
    with pytest.raises(HyperparameterError, match="do not match"):
        PiecewiseSchedule([1.0, 2.0, 3.0], [5, 1])


def test_values():
    cosine = CosineSchedule(2.0, 1.0, 4)
    assert [cosine(t) for t in (0, 4, 9)] == [2.0, 1.0, 1.0]
    assert math.isclose(cosine(1), 1 + 0.5 * (1 + math.cos(math.pi / 4)))
