"""Callbacks pass on hyperparameters that only their algorithm has, refuse bad values before the fit, and train."""

from __future__ import annotations

from functools import partial

import pytest
from tiny_training import Classifier, fit
from torch import nn

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
from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError
from lightning_bayes.optim import (
    BBB,
    CVI,
    IVON,
    VON,
    MomentumVON,
    NoisyAdam,
    NoisyAdamFisher,
    ReparameterisedVON,
    VadaGrad,
    Vadam,
    Vprop,
    Vprop0,
)
from lightning_bayes.optim.groups import flat

CASES = [
    (VadamCallback, Vadam, {}),
    (IVONCallback, IVON, {"clip_radius": 0.5, "rescale_lr": True, "lr": 0.1, "init_precision": 50.0}),
    (VpropCallback, Vprop, {"scaling": "mean", "betas": (0.0, 0.99)}),
    (Vprop0Callback, Vprop0, {"scaling": "sum"}),
    (VadaGradCallback, VadaGrad, {"temperature": 0.25}),
    (NoisyAdamCallback, NoisyAdam, {"damping": 1e-3}),
    (NoisyAdamFisherCallback, NoisyAdamFisher, {"damping": 1e-3}),
    (VONCallback, VON, {"positivity": "correction"}),
    (partial(VONCallback, hessian="reparameterised"), ReparameterisedVON, {"positivity": "backtracking"}),
    (MomentumVONCallback, MomentumVON, {"positivity": "backtracking", "lr": 0.01}),
    (CVICallback, CVI, {"mc_samples": 2}),
    (BBBCallback, BBB, {"std_lr": 0.02}),
]


@pytest.mark.parametrize(("callback", "optimizer", "arguments"), CASES)
def test_arguments_arrive_in_the_groups(callback, optimizer, arguments):
    ours = callback(**arguments)
    fit(Classifier(), ours, max_epochs=2)
    found = {**flat(ours.optimizer.param_groups[0]), "mc_samples": ours.mc_samples}
    assert type(ours.optimizer) is optimizer
    assert {name: found[name] for name in arguments if name != "lr"} == {
        n: v for n, v in arguments.items() if n != "lr"
    }
    assert ours.optimizer.num_updates == 12
    assert all((precision > 0).all() for precision in ours.optimizer.posterior().precision.values())


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
        (VONCallback, {"hessian": "ggn"}, r"hessian='ggn' must be one of 'exact', 'reparameterised'"),
        (VONCallback, {"positivity": "clip"}, r"positivity='clip' must be 'backtracking'"),
        (BBBCallback, {"std_lr": -1.0}, r"std_lr=-1\.0 must be at least 0"),
    ],
)
def test_bad_arguments_are_refused_by_the_callback(callback, arguments, message):
    with pytest.raises(HyperparameterError, match=message):
        callback(**arguments)


def test_a_model_without_hessian_is_refused_by_name():
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    with pytest.raises(UnsupportedLayerError, match=r"net\.1 \(LayerNorm\)\. .*VOGN, or hessian='reparameterised' in"):
        fit(Classifier(net=net), VONCallback())
    fit(Classifier(net=net), VONCallback(hessian="reparameterised"))


VARIATIONAL = {*(kind for kind, _, _ in CASES if isinstance(kind, type)), VOGNCallback}
VARIATIONAL |= {OGNCallback, KFACCallback, NoisyKFACCallback}


@pytest.mark.parametrize("callback", sorted(VARIATIONAL, key=lambda each: each.__name__))
@pytest.mark.parametrize(("value", "meant"), [(0.1, "lr=0.1"), (5, "mc_samples=5"), ("last.ckpt", "prior='last.ckpt'")])
def test_an_argument_without_a_name_is_told_the_keyword(callback, value, meant):
    message = f"{callback.__name__} takes keyword arguments only, got .*Did you mean {meant}"
    with pytest.raises(TypeError, match=message):
        callback(value)
