"""Submodules that torch.jit has compiled, which refuse hooks and copies of attributes."""

from __future__ import annotations

import pytest
import torch
from tiny_training import RecordingClassifier, assert_same_bits, loader, quiet_trainer, weights
from torch import nn

from lightning_bayes import (
    IVONCallback,
    LaplaceCallback,
    MultiModeCallback,
    NoisyKFACCallback,
    SWAGCallback,
    VOGNCallback,
)
from lightning_bayes.errors import UnsupportedTrainingError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")


def net(compile_part, frozen):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body, head = nn.Sequential(nn.Linear(4, 6), nn.ReLU()).requires_grad_(not frozen), nn.Linear(6, 3)
        return RecordingClassifier(net=nn.Sequential(compile_part(body), head))


def scripted(part):
    return torch.jit.script(part)


def traced(part):
    return torch.jit.trace(part, torch.ones(2, 4))


def fitted(module, *callbacks):
    torch.manual_seed(1)
    # After training, TorchScript does not run in inference mode, in plain Lightning neither.
    trainer = quiet_trainer(*callbacks, max_epochs=4, num_sanity_val_steps=0, inference_mode=False)
    trainer.fit(module, loader(), loader())
    return trainer


@pytest.mark.parametrize("compile_part", [scripted, traced])
@pytest.mark.parametrize("make", [IVONCallback, lambda: SWAGCallback(start=0), MultiModeCallback])
def test_they_train_and_are_evaluated_as_the_original(make, compile_part):
    results = []
    for part in (compile_part, lambda original: original):
        module = net(part, frozen=False)
        (found,) = fitted(module, make()).test(module, loader(), verbose=False)
        results.append((found["loss"], list(weights(module).values())))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for compiled, original in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(compiled, original)


@pytest.mark.parametrize("compile_part", [scripted, traced])
@pytest.mark.parametrize("make", [VOGNCallback, NoisyKFACCallback, lambda: LaplaceCallback(prior_precision=1.0)])
def test_frozen_ones_stay_as_they_are(make, compile_part):
    module = net(compile_part, frozen=True)
    before = weights(module.net[0])
    trainer = fitted(module, make())
    trainer.test(module, loader(), verbose=False)
    assert_same_bits(weights(module.net[0]), before)


def test_laplace_takes_another_layer_and_says_how():
    with pytest.raises(UnsupportedTrainingError, match=r"compiled net\.0\.0.*such as subset='head'"):
        fitted(net(scripted, frozen=False), LaplaceCallback(prior_precision=1.0))
    callback = LaplaceCallback(prior_precision=1.0, subset=r"net\.1")
    module = net(scripted, frozen=False)
    fitted(module, callback).test(module, loader(), verbose=False)
    assert callback.posterior.mean.keys() == {"net.1.weight", "net.1.bias"}
