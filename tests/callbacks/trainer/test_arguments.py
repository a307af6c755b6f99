"""Constructors of plain callbacks: unknown names and values of another kind are told the argument that was meant."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from jsonargparse import ArgumentParser

from lightning_bayes import (
    Calibration,
    DeepEnsembleCallback,
    LaplaceCallback,
    MCDropoutCallback,
    MultiModeCallback,
    SWAGCallback,
    VOGNCallback,
    callbacks,
)
from lightning_bayes.callbacks import BatchNormRecalibration, EvaluationFigures, PredictionWriter, VariationalCallback
from lightning_bayes.errors import HyperparameterError

PLAIN = [
    each
    for name in callbacks.__all__
    if inspect.isclass(each := getattr(callbacks, name)) and not issubclass(each, VariationalCallback)
]


@pytest.mark.parametrize("callback", PLAIN)
def test_an_unknown_name_is_told_the_arguments(callback):
    names = sorted(inspect.signature(callback).parameters)
    with pytest.raises(
        TypeError, match=f"{callback.__name__} has no argument colour.* arguments are: {', '.join(names)}"
    ):
        callback(colour="red")


def test_a_word_of_several_names_is_told_all_of_them():
    with pytest.raises(
        TypeError, match=r"no argument samples\. Did you mean eval_samples or mc_samples or val_samples\?"
    ):
        VOGNCallback(samples=5)


@pytest.mark.parametrize(
    ("callback", "arguments", "meant"),
    [
        (SWAGCallback, {"num_samples": 3}, "eval_samples"),
        (LaplaceCallback, {"structur": "full"}, "structure"),
        (DeepEnsembleCallback, {"num_members": 5}, "members"),
        (MultiModeCallback, {"modes": 3}, "num_modes"),
        (PredictionWriter, {"path": "x"}, "dirpath"),
        (Calibration, {"linearised": True}, "linearized"),
        (Calibration, {"re_fit": True}, "refit"),
    ],
)
def test_an_unknown_name_is_told_the_nearest(callback, arguments, meant):
    with pytest.raises(TypeError, match=rf"Did you mean {meant}\?"):
        callback(**arguments)


@pytest.mark.parametrize(
    ("callback", "value", "meant"),
    [
        (SWAGCallback, "classification", "link='classification'"),
        (LaplaceCallback, 10, "eval_samples=10"),
        (MCDropoutCallback, 0.1, "p=0.1"),
        (MultiModeCallback, "binary", "link='binary'"),
        (PredictionWriter, 0.8, "reject_below=0.8"),
        (EvaluationFigures, True, "required=True"),
        (BatchNormRecalibration, "mean", "of='mean'"),
    ],
)
def test_a_value_without_a_name_is_told_the_argument_that_takes_it(callback, value, meant):
    with pytest.raises(TypeError, match=f"{callback.__name__} takes no .*Did you mean {meant}"):
        callback(value)


@pytest.mark.parametrize(
    ("callback", "arguments"),
    [
        (SWAGCallback, {"start": "0.5"}),
        (Calibration, {"refit": 1.5}),
        (DeepEnsembleCallback, {"members": True}),
        (MCDropoutCallback, {"layers": 3}),
    ],
)
def test_a_value_of_another_kind_is_shown(callback, arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(TypeError, match=f"takes no {type(value).__name__} as {name}, got {value!r}"):
        callback(**arguments)


def test_values_that_the_constructor_explains_better_reach_it():
    with pytest.raises(HyperparameterError, match="structure='diag' is unknown; use 'diagonal'"):
        LaplaceCallback("diag")
    with pytest.raises(HyperparameterError, match=r"every=1.5 a whole number|every=1.5"):
        SWAGCallback(every=1.5)


def test_numbers_of_numpy_are_numbers():
    callback = SWAGCallback(np.float64(0.5), np.int64(2), lr=np.float32(0.5))
    assert (callback.start, callback.every) == (0.5, 2)


def test_too_many_arguments_are_told_all():
    with pytest.raises(TypeError, match=r"too many positional arguments\. Its arguments are: linearized, refit, width"):
        Calibration(None, False, True, 3)


@pytest.mark.parametrize("callback", PLAIN)
def test_signatures_and_the_command_line_stay(callback):
    source = inspect.getsource(inspect.unwrap(callback.__init__))
    names = list(inspect.signature(callback).parameters)
    assert all(f"{name}:" in source for name in names)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(callback, "made")
    text = parser.format_help()
    assert all(f"--made.{name}" in text for name in names)
