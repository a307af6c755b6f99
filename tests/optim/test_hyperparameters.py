"""Hyperparameters: error messages, documented defaults, and numbers that checkpoints can store."""

from __future__ import annotations

import ast
import inspect
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jsonargparse import ArgumentError, ArgumentParser
from optimizer_family import through_a_file, train_on
from torch import nn
from typing_extensions import Unpack

from lightning_bayes.callbacks.fit.fields import CallbackFields
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim import VOGN, VONG
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.groups import flat
from lightning_bayes.optim.hyperparameters import HostSettings, HyperparameterFields, OptimizerFields
from lightning_bayes.optim.settings import Setting, declaration_of

DEFAULTS = declaration_of(OptimizerFields, HostSettings).defaults
PLAIN = {
    "lr": 0.0625,
    "betas": (0.5, 0.75),
    "prior_precision": 0.5,
    "kl_weight": 0.25,
    "num_data": 24,
    "damping_in_noise": True,
    "seed": 3,
}
OTHERS = {
    "doubles": {"lr": np.float64(0.0625), "prior_precision": np.float64(0.5), "kl_weight": np.float64(0.25)},
    "of other widths": {
        "lr": np.float32(0.0625),
        "num_data": np.int64(24),
        "damping_in_noise": np.True_,
        "seed": np.int32(3),
    },
    "tensors": {"lr": torch.tensor(0.0625), "num_data": torch.tensor(24), "prior_precision": np.array(0.5)},
    "betas": {"betas": [np.float64(0.5), torch.tensor(0.75)]},
    "an array of betas": {"betas": np.array([0.5, 0.75])},
    "functions": {"kl_weight": lambda t: np.float64(0.25), "betas": lambda t: np.array([0.5, 0.75])},
}


def trained(optimizer=VOGN, **arguments):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    opt = optimizer(model, **arguments)
    x, y = torch.ones(8, 3), torch.arange(8) % 2
    train_on(opt, lambda: F.cross_entropy(model(x), y), 3)
    return model, opt


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_numbers_of_numpy_and_tensors_train_like_python_s_and_are_saved_as_such(others):
    model, opt = trained(**{**PLAIN, **others})
    expected, _ = trained(**PLAIN)
    assert torch.equal(model.weight, expected.weight)
    (group,) = through_a_file(opt.state_dict())["param_groups"]
    wanted = {"noise_seed" if name == "seed" else name: value for name, value in PLAIN.items()}
    settings = flat(group)
    assert {name: settings[name] for name in wanted} == wanted
    assert all(type(settings[name]) is type(value) for name, value in wanted.items())


def test_a_posterior_over_all_weights_takes_them_too():
    numbers = {"lr": np.float64(0.0625), "num_data": np.int64(24), "betas": [np.float64(0.5), 0.75]}
    _, opt = trained(VONG, **numbers)
    (group,) = through_a_file(opt.state_dict())["param_groups"]
    assert (group["lr"], group["posterior"]["num_data"], group["posterior"]["betas"]) == (0.0625, 24, (0.5, 0.75))


@pytest.mark.parametrize("build", [VOGN, VONG])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": None}, "lr=None must be at least 0"),
        ({"prior_precision": None}, "prior_precision=None must be above 0"),
        ({"betas": 0.9}, r"betas=0\.9 must be two numbers of at least 0 and below 1"),
        ({"betas": None}, "betas=None must be two numbers"),
        ({"seed": "a"}, "seed='a' must be a whole number"),
        (
            {"prior_precision": "0.1"},
            r"prior_precision='0\.1' must be above 0\. Pass prior_precision=0\.1, without quotes",
        ),
        ({"num_data": np.int64(-3)}, "num_data=-3 must be above 0"),
        (
            {"num_data": lambda t: 10, "init_precision": lambda t: 1.0},
            "init_precision, num_data cannot be a function of",
        ),
    ],
)
def test_an_optimizer_needs_numbers(build, arguments, message):
    with pytest.raises(HyperparameterError, match=message):
        build(nn.Linear(2, 2), **arguments)


@pytest.mark.parametrize("fields", [HyperparameterFields, OptimizerFields, CallbackFields, HostSettings])
def test_every_typed_argument_declares_its_range_and_default(fields):
    declared = declaration_of(fields)
    assert declared.settings.keys() == fields.__annotations__.keys()
    for name, setting in declared.settings.items():
        assert isinstance(setting, Setting)
        assert setting.default is None or setting.default in setting.range, name


def test_every_typed_argument_is_described():
    described = {
        fields: re.findall(r"^ {4}(\w+): ", inspect.getdoc(fields), flags=re.MULTILINE)
        for fields in (HyperparameterFields, OptimizerFields)
    }
    assert set(described[HyperparameterFields]) == set(HyperparameterFields.__annotations__)
    own = set(OptimizerFields.__annotations__) - set(HyperparameterFields.__annotations__)
    assert set(described[OptimizerFields]) == own


def test_a_group_holds_the_arguments_and_gives_effective_values():
    _, opt = trained(**PLAIN)
    (group,) = opt.param_groups
    values = flat(group)
    assert (values["lr"], values["betas"], values["step"]) == (0.0625, (0.5, 0.75), 3)
    assert effective(group).prior == 0.25 * 0.5 / 24


def test_effective_values_follow_warm_up_augmentation_and_damping():
    group = {**DEFAULTS, "num_data": 50, "prior_precision": 4.0, "kl_weight": 0.5, "damping": 0.25}
    group |= {"data_augmentation_factor": 2.0, "kl_warmup_steps": 10, "kl_warmup_init": 0.2}
    assert effective({"posterior": {**group, "step": 5}}).kl_weight == pytest.approx(0.5 * 0.6)
    now = effective({"posterior": {**group, "step": 10}})
    assert (now.num_data, now.kl_weight, now.prior, now.scale) == (100, 0.5, 0.02, 200)
    assert (now.damping, now.noise_damping) == (0.25, 0.0)
    assert effective({"posterior": {**group, "step": 10, "damping_in_noise": True}}).noise_damping == 0.25


def test_an_argument_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="There is no argument learning_rate"):
        VOGN(nn.Linear(2, 1), learning_rate=0.1)


def test_command_lines_list_and_check_the_typed_arguments():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--fields", type=Described)
    given = ["--fields=Described", "--fields.kl_weight=0.5", "--fields.prior_mean=initial"]
    settings = parser.parse_args(given).fields.init_args
    assert (settings.kl_weight, settings.prior_mean) == (0.5, "initial")
    with pytest.raises(ArgumentError, match="prior_mean"):
        parser.parse_args(["--fields=Described", "--fields.prior_mean=final"])


class Described:
    def __init__(self, **fields: Unpack[HyperparameterFields]) -> None:
        self.fields = fields


def test_a_callback_may_leave_some_open_but_not_a_function():
    of_callbacks, of_optimizers = declaration_of(CallbackFields), declaration_of(OptimizerFields)
    of_callbacks.check({"lr": None, "prior_precision": None, "data_augmentation_factor": None, "num_data": None})
    of_callbacks.check({"prior_precision": 1.0, "data_augmentation_factor": None, "num_data": 10, "kl_weight": 1.0})
    with pytest.raises(HyperparameterError, match=r"^lr=None must be at least 0\.$"):
        of_optimizers.check({"lr": lambda t: None, "prior_precision": 1.0})
    with pytest.raises(HyperparameterError, match="eval_samples cannot be a function of the step"):
        of_callbacks.check({"eval_samples": lambda t: 2})
    with pytest.raises(HyperparameterError, match="mc_samples=None must be a whole number"):
        of_callbacks.check({"mc_samples": None})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step_rule": "Natural"}, "step_rule='Natural' must be 'natural' or 'trust_region' or 'user'"),
        ({"radius": "foo"}, "radius='foo' must be 'adam' or 'sgd'"),
        ({"prior_mean": ["zero"]}, r"prior_mean=\['zero'\] must be 'zero' or 'initial'"),
        ({"step_rule": "user"}, r"step_rule='user' and base=None do not match: .* Pass that optimizer as base=\.\.\."),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(arguments, message):
    with pytest.raises(HyperparameterError, match=message):
        VOGN(nn.Linear(2, 1), **arguments)


def test_a_group_has_the_step_rule_of_the_optimizer_that_moves_it():
    model = nn.Linear(2, 1)
    opt = VOGN(model, base=torch.optim.SGD([model.weight], lr=0.1))
    with pytest.raises(HyperparameterError, match="step_rule='natural' and base=SGD do not match"):
        opt.add_param_group({"params": [model.bias], "posterior": {"step_rule": "natural"}})


@pytest.mark.parametrize("fields", [HyperparameterFields, OptimizerFields])
def test_the_documented_defaults_are_those_of_the_record(fields):
    entries = re.split(r"\n {4}(?=\w+: )", inspect.getdoc(fields))[1:]
    stated = {
        e.partition(":")[0]: ast.literal_eval(m[1])
        for e in entries
        if (m := re.search(r"Default:\s+`{0,2}(.+?)`{0,2}(?:\.\s|\.?$|\s+unless)", e, re.S))
    }
    assert len(stated) >= 9
    assert stated == {name: DEFAULTS[name] for name in stated}
