"""What makes the measured modules of a model be found again."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_bayes.curvature.measured_modules import find_measured_modules
from lightning_bayes.curvature.plan import Plans


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
