"""Buffers that a forward changes in evaluation, too: counters, observers, running means, as in plain Lightning."""

from __future__ import annotations

import pytest
import torch
import torch.ao.quantization as quantization
from tiny_training import RecordingClassifier, assert_close, assert_same_bits, blobs, loader, quiet_trainer
from torch import nn

from lightning_bayes import IVONCallback, LaplaceCallback, VOGNCallback, mc_predict

pytestmark = pytest.mark.filterwarnings("ignore:.*(torch.ao.quantization is deprecated|reduce_range)")


class Counter(nn.Module):
    """Counts its calls in place, or by a new tensor."""

    def __init__(self, in_place=True):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return x


def counting(in_place):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return RecordingClassifier(net=nn.Sequential(nn.Linear(4, 6), Counter(in_place), nn.Tanh(), nn.Linear(6, 3)))


def quantized():
    module = counting(in_place=True)
    module.net = module.net.train()
    module.net.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    quantization.prepare_qat(module.net, inplace=True)
    return module


def buffers_after(module, *callbacks):
    trainer = quiet_trainer(*callbacks, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, loader(), loader())
    trainer.test(module, loader(), verbose=False)
    return {name: value.clone() for name, value in module.named_buffers()}


METHODS = {
    "VOGN": lambda: VOGNCallback(calibrate=False),
    "VOGN, calibrated": VOGNCallback,
    "IVON": IVONCallback,
    "Laplace": lambda: LaplaceCallback(prior_precision=1.0),
}


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_counted_once(method, in_place):
    found = buffers_after(counting(in_place), METHODS[method]())
    assert_same_bits(found, buffers_after(counting(in_place)))


@pytest.mark.parametrize(
    "make", [lambda: VOGNCallback(relative_noise=1e-30, calibrate=False), lambda: LaplaceCallback(prior_precision=1.0)]
)
def test_observers_see_what_they_see_in_plain_lightning(make):
    assert_close(buffers_after(quantized(), make()), buffers_after(quantized()), rtol=1e-5, atol=1e-6)


def test_a_prediction_leaves_buffers_alone():
    module, callback = counting(in_place=True), VOGNCallback(calibrate=False)
    quiet_trainer(callback, num_sanity_val_steps=0).fit(module, loader(), loader())
    before = module.net[1].calls.clone()
    mc_predict(module, callback.optimizer.posterior(), blobs().tensors[0], samples=4)
    assert module.net[1].calls == before
