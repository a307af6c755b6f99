"""Callbacks pass on hyperparameters that only their algorithm has, and refuse bad values before the fit."""

from __future__ import annotations

import pytest
from tiny_training import Classifier, loader, quiet_trainer

from lightning_bayes import (
    BBBCallback,
    CVICallback,
    IVONCallback,
    KFACCallback,
    LinearSchedule,
    MomentumVONCallback,
    NoisyAdamCallback,
    NoisyAdamFisherCallback,
    NoisyKFACCallback,
    OGNCallback,
    VadaGradCallback,
    VadamCallback,
    VOGNCallback,
    VONCallback,
    Vprop0Callback,
    VpropCallback,
)
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim import IVON, NoisyAdam, NoisyAdamFisher, VadaGrad, Vadam, Vprop, Vprop0

CASES = [
    (VadamCallback, Vadam, {}),
    (IVONCallback, IVON, {"clip_radius": 0.5, "rescale_lr": True, "lr": 0.1, "init_precision": 50.0}),
    (VpropCallback, Vprop, {"scaling": "mean", "betas": (0.0, 0.99)}),
    (Vprop0Callback, Vprop0, {"scaling": "sum"}),
    (VadaGradCallback, VadaGrad, {"temperature": 0.25}),
    (NoisyAdamCallback, NoisyAdam, {"damping": 1e-3}),
    (NoisyAdamFisherCallback, NoisyAdamFisher, {"damping": 1e-3}),
]


@pytest.mark.parametrize(("callback", "optimizer", "arguments"), CASES)
def test_arguments_arrive_in_the_groups(callback, optimizer, arguments):
    ours = callback(**arguments)
    quiet_trainer(ours, max_steps=2).fit(Classifier(), loader())
    assert type(ours.optimizer) is optimizer
    group = ours.optimizer.param_groups[0]["posterior"]
    assert {name: group[name] for name in arguments if name != "lr"} == {
        n: v for n, v in arguments.items() if n != "lr"
    }


def test_a_temperature_falls_with_the_updates():
    callback = VadaGradCallback(temperature=LinearSchedule(1.0, 0.0, steps=4))
    quiet_trainer(callback, max_steps=3).fit(Classifier(), loader())
    assert callback.optimizer.param_groups[0]["posterior"]["temperature"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("callback", "arguments", "message"),
    [
        (IVONCallback, {"clip_radius": -1.0}, r"clip_radius=-1\.0 must be above 0"),
        (IVONCallback, {"rescale_lr": True}, r"rescale_lr=True .* Pass lr=\.\.\."),
        (VpropCallback, {"scaling": "median"}, r"scaling='median' must be 'mean' or 'sum'"),
        (VadaGradCallback, {"temperature": 2.0}, r"temperature=2\.0 must be at least 0 and at most 1"),
        (VadaGradCallback, {"temperature": LinearSchedule(2.0, 0.0, 5)}, r"temperature=2\.0 must be at least 0"),
        (VadaGradCallback, {"kl_weight": 0.5}, r"kl_weight=0\.5, but its temperature"),
        (VadamCallback, {"betas": (1.0, 0.9)}, r"betas=\(1\.0, 0\.9\) must be two numbers"),
    ],
)
def test_bad_arguments_are_refused_by_the_callback(callback, arguments, message):
    with pytest.raises(HyperparameterError, match=message):
        callback(**arguments)


VARIATIONAL = {*(callback for callback, _, _ in CASES), VOGNCallback, VONCallback, MomentumVONCallback, CVICallback}
VARIATIONAL |= {OGNCallback, BBBCallback, KFACCallback, NoisyKFACCallback}


@pytest.mark.parametrize("callback", sorted(VARIATIONAL, key=lambda each: each.__name__))
@pytest.mark.parametrize(("value", "meant"), [(0.1, "lr=0.1"), (5, "mc_samples=5"), ("last.ckpt", "prior='last.ckpt'")])
def test_an_argument_without_a_name_is_told_the_keyword(callback, value, meant):
    message = f"{callback.__name__} takes keyword arguments only, got .*Did you mean {meant}"
    with pytest.raises(TypeError, match=message):
        callback(value)
