"""The callbacks' arguments come from one typed record, which serves calls, configs, help texts and errors about typos."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback

import lightning_bayes.callbacks as room
from docs.site import arguments
from lightning_bayes import IVONCallback, NoisyKFAC, NoisyKFACCallback, Schedule, VOGNCallback, VONCallback
from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.fit.fields import CallbackFields, declaration
from lightning_bayes.callbacks.fit.noise_rule import MEMORISED
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim.default_noise import (
    FLATNESS_OF_CLASSIFIERS,
    FLATNESS_OF_CONVOLUTIONS,
    NOISE_OF_CLASSIFIERS,
    NOISE_OF_CONVOLUTIONS,
    NOISE_OF_NORMALISED,
    NOISE_OF_REGRESSIONS,
)
from lightning_bayes.optim.diagonal.ivon import IVONOwn
from lightning_bayes.optim.hyperparameters import HostSettings
from lightning_bayes.optim.settings import ANY

FAMILY = [
    value
    for value in vars(room).values()
    if inspect.isclass(value) and issubclass(value, VariationalCallback) and not inspect.isabstract(value)
    if value is not room.OptimizerCallback  # has the arguments of any optimizer
]


def parser():
    found = ArgumentParser(exit_on_error=False)
    found.add_subclass_arguments(Callback, "callback")
    found.add_argument("--config", action="config")
    return found


def help_of(callback, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args([f"--callback.help=lightning_bayes.{callback.__name__}"])
    return capsys.readouterr().out


@pytest.mark.parametrize("callback", FAMILY, ids=lambda c: c.__name__)
def test_the_help_lists_every_argument_with_its_text(callback, capsys):
    text = help_of(callback, capsys)
    lines = " ".join(text.split())
    for name in declaration(callback().optimizer_class).settings:
        described = lines.partition(f"--callback.{name} {name.upper()}")[2] or lines.partition(f"--callback.{name} ")[2]
        assert described, name
    assert "τ, weight of the KL term" in lines
    assert "δ of the prior N(μ₀, 1/δ)" in lines


def test_every_field_has_a_text():
    missing = [name for name in CallbackFields.__annotations__ if f"    {name}: " not in inspect.getdoc(CallbackFields)]
    assert not missing


def test_the_help_of_relative_noise_and_noise_flatness_states_the_defaults_of_the_code():
    text = " ".join((CallbackFields.__doc__ or "").split())
    assert (
        f"use {NOISE_OF_NORMALISED} with normalisation layers, else {NOISE_OF_CONVOLUTIONS} with convolutions and "
        f"{NOISE_OF_CLASSIFIERS} without; other models use {NOISE_OF_REGRESSIONS}"
    ) in text
    assert f"below {MEMORISED} of the smallest validation NLL" in text
    assert f"defaults to {NOISE_OF_CONVOLUTIONS}, {FLATNESS_OF_CONVOLUTIONS:g}; where it" in text
    assert f"defaults to {NOISE_OF_CLASSIFIERS}, {FLATNESS_OF_CLASSIFIERS}." in text


@pytest.mark.parametrize("callback", FAMILY, ids=lambda c: c.__name__)
@pytest.mark.parametrize("text_of", [inspect.getdoc, lambda callback: callback.__init__.__doc__], ids=["class", "init"])
def test_docstrings_list_every_argument_with_its_range_and_default(callback, text_of):
    """What `help`, a notebook's ``?`` and an editor's pop-up show."""
    listed = text_of(callback).partition("with range and default:")[2]
    entries = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", listed, re.MULTILINE))
    parameters = {n: p for n, p in inspect.signature(callback).parameters.items() if n != "hessian"}
    declared = declaration(callback.optimizer_class).settings
    assert entries.keys() == parameters.keys() == declared.keys()
    for name, entry in entries.items():
        words, default = " ".join(entry.split()), parameters[name].default
        assert declared[name].range is ANY or f"({declared[name].range.words}; default" in words, name
        assert f"default {default!r}" in words, name


def test_help_docs_and_command_line_share_one_text(capsys):
    lines, page = " ".join(help_of(VOGNCallback, capsys).split()), arguments.arguments(VOGNCallback)
    entries = " ".join(VOGNCallback.__doc__.split())
    for name, (_, _, _, purpose) in page.items():
        assert purpose in lines, name
        assert f"{name}: {purpose.replace('``', '')}" in entries, name


def test_an_optimizers_docstring_lists_its_arguments():
    text = " ".join(inspect.getdoc(NoisyKFAC).split())
    assert "betas: (β₁, β₂), decay rates of the momentum and of the curvature average, as in Adam" in text
    for name in NoisyKFAC.declaration().settings.keys() - HostSettings.__annotations__.keys():
        assert f" {name}: " in text, name


@pytest.mark.parametrize("callback", FAMILY, ids=lambda c: c.__name__)
def test_the_signature_has_every_argument_with_its_default(callback):
    parameters, built = dict(inspect.signature(callback).parameters), callback()
    assert parameters.keys() - {"hessian"} == declaration(built.optimizer_class).settings.keys()
    assert callback(**{name: value.default for name, value in parameters.items()}).arguments == built.arguments


def test_a_declaration_is_read_from_the_signature_and_the_help():
    """One declaration: type, range, default and text of one argument, wherever they are read."""
    parameter = inspect.signature(IVONCallback).parameters["clip_radius"]
    assert (parameter.default, parameter.annotation) == (math.inf, float | Schedule)
    assert "clip_radius" in IVONOwn.__annotations__
    assert "bound of each component" in IVONOwn.__doc__
    with pytest.raises(HyperparameterError, match=r"clip_radius=-1\.0 must be above 0"):
        IVONCallback(clip_radius=-1.0)


def test_a_flat_config_builds_the_callback(tmp_path):
    path = tmp_path / "callback.yaml"
    arguments = {"kl_weight": 0.1, "mc_samples": 2, "betas": [0.8, 0.9], "clip_radius": 3.0, "lr": 0.5}
    path.write_text(
        yaml.safe_dump({"callback": {"class_path": "lightning_bayes.IVONCallback", "init_args": arguments}})
    )
    config = parser().parse_args([f"--config={path}", "--callback.damping=0.25"])
    callback = parser().instantiate(config).callback
    assert type(callback) is IVONCallback
    found = {**callback.group_defaults, **callback.optimizer_kwargs, "lr": callback.lr}
    expected = {**arguments, "betas": (0.8, 0.9), "damping": 0.25}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("callback", [VOGNCallback, NoisyKFACCallback, VONCallback])
def test_a_misspelt_argument_is_named(callback):
    with pytest.raises(TypeError, match=rf"{callback.__name__} has no argument kl_weigth\. Did you mean kl_weight\?"):
        callback(kl_weigth=0.1)
    with pytest.raises(Exception, match="kl_weigth"):
        parser().parse_args([f"--callback=lightning_bayes.{callback.__name__}", "--callback.kl_weigth=0.1"])


def test_a_link_may_be_a_function_and_other_arguments_only_of_the_step():
    def as_normal(outputs):
        return torch.distributions.Normal(outputs, 1.0)

    assert VOGNCallback(link=as_normal).arguments.link is as_normal
    with pytest.raises(HyperparameterError, match="antithetic cannot be a function of the step"):
        VOGNCallback(antithetic=lambda step: True)


def test_a_value_of_another_type_is_named():
    with pytest.raises(Exception, match=r"(?s)kl_weight.*float"):
        parser().parse_args(["--callback=lightning_bayes.VOGNCallback", "--callback.kl_weight=much"])


def test_defaults_are_those_of_the_optimizer():
    for callback in FAMILY:
        built, optimizer = callback(), callback().optimizer_class
        defaults = {**optimizer.declaration().defaults, **optimizer.own_defaults, **callback.field_defaults}
        for name in ("betas", "kl_weight", "kl_warmup_steps", "damping", "init_precision", "prior_mean"):
            assert built.group_defaults[name] == defaults[name], (callback, name)
        assert built.mc_samples == defaults["mc_samples"]
