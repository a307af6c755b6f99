"""The callbacks of VON, MomentumVON, CVI and BBB pass on their arguments, refuse bad ones, and train."""

from __future__ import annotations

import pytest
from tiny_training import Classifier, fit
from torch import nn

from lightning_bayes import BBBCallback, CVICallback, MomentumVONCallback, VONCallback
from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError
from lightning_bayes.optim import BBB, CVI, VON, MomentumVON, ReparameterisedVON
from lightning_bayes.optim.groups import flat


@pytest.mark.parametrize(
    ("callback", "optimizer", "entries"),
    [
        (VONCallback(positivity="correction"), VON, {"positivity": "correction"}),
        (VONCallback(hessian="reparameterised"), ReparameterisedVON, {"positivity": "backtracking"}),
        (MomentumVONCallback(lr=0.01), MomentumVON, {"positivity": "backtracking", "lr": 0.01}),
        (CVICallback(mc_samples=2), CVI, {"betas": (0.0, 0.999), "positivity": "backtracking"}),
        (BBBCallback(std_lr=0.02), BBB, {"std_lr": 0.02}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_trains_with_its_optimizer_and_leaves_a_posterior(callback, optimizer, entries):
    trainer = fit(Classifier(), callback, max_epochs=2)
    found = trainer.optimizers[0]
    assert type(found) is optimizer
    settings = flat(found.param_groups[0])
    assert {name: settings[name] for name in entries} == entries
    assert found.num_updates == 12
    assert all((precision > 0).all() for precision in found.posterior().precision.values())


def test_cvi_takes_ten_samples_by_default():
    module = Classifier()
    fit(module, CVICallback(), limit_train_batches=1)
    assert module.training_steps == 10


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: VONCallback(hessian="ggn"), r"hessian='ggn' must be one of 'exact', 'reparameterised'"),
        (lambda: VONCallback(positivity="clip"), r"positivity='clip' must be 'backtracking'"),
        (lambda: CVICallback(positivity="clip"), r"positivity='clip' must be 'backtracking'"),
        (lambda: BBBCallback(std_lr=-1.0), r"std_lr=-1\.0 must be at least 0"),
    ],
)
def test_bad_arguments_are_refused_when_they_are_given(build, message):
    with pytest.raises(HyperparameterError, match=message):
        build()


def test_a_model_without_hessian_is_refused_by_name():
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    with pytest.raises(UnsupportedLayerError, match=r"net\.1 \(LayerNorm\)\. .*VOGN, or hessian='reparameterised' in"):
        fit(Classifier(net=net), VONCallback())
    fit(Classifier(net=net), VONCallback(hessian="reparameterised"))
