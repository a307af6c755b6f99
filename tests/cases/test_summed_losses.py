"""A loss that is a sum over the batch: the default step moves the mean as plain Lightning does, with the user's optimizer.

A sum over n examples trained at rate α/n with an L2 penalty n·wd is the mean trained at rate α with penalty wd. This second
truth holds for SGD with noise, with a prior, and for the posterior.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_training import Classifier, assert_close, assert_same_bits, fit, loader, mlp, weights

from lightning_bayes import IVON, VOGN, IVONCallback, KFACCallback, NoisyKFACCallback, VadamCallback, VOGNCallback
from lightning_bayes.optim.effective import effective

BATCH = 8


def summed(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum")


def of_torch(name, **options):
    return lambda module: getattr(torch.optim, name)(module.parameters(), **options)


OPTIMIZERS = {
    "SGD": of_torch("SGD", lr=1e-3),
    "SGD with momentum and decay": of_torch("SGD", lr=1e-3, momentum=0.9, weight_decay=0.1),
    "Adam with decay": of_torch("Adam", lr=0.01, weight_decay=0.1),
    "AdamW": of_torch("AdamW", lr=0.01),
    "Adagrad": of_torch("Adagrad", lr=0.01),
    "Adadelta": of_torch("Adadelta", lr=0.1),
    "RMSprop": of_torch("RMSprop", lr=1e-3, momentum=0.5),
}
SITUATIONS = {
    "two epochs": {"max_epochs": 2},
    "accumulation": {"accumulate_grad_batches": 2},
    "clipped norms": {"gradient_clip_val": 0.5},
    "clipped values": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
}
METHODS = [VOGNCallback, IVONCallback, VadamCallback, NoisyKFACCallback]


def trained(configure, *callbacks, loss=summed, batch=BATCH, **options):
    module = Classifier(configure, loss=loss)
    fit(module, *callbacks, data=loader(batch), **options)
    return weights(module)


@pytest.mark.parametrize("configure", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_without_noise_the_weights_are_plain_lightnings(configure):
    plain = trained(configure, max_epochs=2)
    assert_same_bits(trained(configure, VOGNCallback(relative_noise=1e-30), max_epochs=2), plain)


@pytest.mark.parametrize("options", SITUATIONS.values(), ids=SITUATIONS.keys())
@pytest.mark.parametrize("method", METHODS)
def test_every_method_leaves_the_users_gradient_as_it_is(method, options):
    configure = OPTIMIZERS["SGD with momentum and decay"]
    found, plain = trained(configure, method(relative_noise=1e-9), **options), trained(configure, **options)
    assert_close(found, plain, rtol=1e-5, atol=1e-7)  # gradients of micro-batches are added in another order


def test_a_smaller_last_batch_keeps_its_weight():
    configure = OPTIMIZERS["SGD"]
    found = trained(configure, VOGNCallback(relative_noise=1e-30), batch=7)
    assert_same_bits(found, trained(configure, batch=7))


def both(make, *, rate, decay=0.0, **options):
    """The fits of the sum and of the mean, and their callbacks."""
    callbacks = make(), make()
    sums = trained(of_torch("SGD", lr=rate / BATCH, weight_decay=BATCH * decay), callbacks[0], **options)
    means = trained(of_torch("SGD", lr=rate, weight_decay=decay), callbacks[1], loss=F.cross_entropy, **options)
    return (sums, means), callbacks


@pytest.mark.parametrize(
    ("fields", "decay"),
    [
        ({}, 0.0),
        ({}, 0.2),
        ({"prior_precision": 3.0}, 0.0),
        ({"prior_precision": 3.0}, 0.2),
        ({"mc_samples": 2}, 0.2),
    ],
    ids=["no prior", "L2 penalty", "stated prior", "replaced penalty", "two samples"],
)
@pytest.mark.parametrize("method", [VOGNCallback, IVONCallback, NoisyKFACCallback])
def test_a_sum_has_the_posterior_of_the_mean(method, fields, decay):
    found, callbacks = both(lambda: method(calibrate=False, **fields), rate=0.02, decay=decay, max_epochs=3)
    assert_close(*found, rtol=1e-4, atol=1e-6)
    deltas = [effective(callback.optimizer.param_groups[0]).prior_precision for callback in callbacks]
    assert deltas[0] == pytest.approx(deltas[1], rel=1e-6)
    precisions = [callback.optimizer.posterior().log_det_precision() for callback in callbacks]
    torch.testing.assert_close(*precisions, rtol=1e-4, atol=1e-3)


def test_the_trust_region_of_sgd_has_its_steps_length():
    found, _ = both(KFACCallback, rate=0.1, max_epochs=2)
    assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [VOGN, IVON])
def test_a_plain_loop_gives_the_base_optimizer_the_sum(method):
    plain, ours = mlp(), mlp()
    sgd = torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9)
    base = torch.optim.SGD(ours.parameters(), lr=1e-3, momentum=0.9)
    optimizer = method(ours, base=base, num_data=48, relative_noise=1e-9)
    for x, y in loader(BATCH):
        sgd.zero_grad()
        summed(plain(x), y).backward()
        sgd.step()
        with optimizer.sampled_params():
            summed(ours(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(weights(ours), weights(plain), rtol=1e-5, atol=1e-7)


def test_the_number_of_examples_is_stored_and_averaged_over_processes():
    """Processes may count different examples, but their priors must not differ."""
    model = mlp()
    optimizer = VOGN(model, base=torch.optim.SGD(model.parameters(), lr=1e-3, weight_decay=0.1), num_data=48)
    x, y = next(iter(loader(BATCH)))
    with optimizer.sampled_params():
        summed(model(x), y).backward()
    tensors, examples = optimizer.collect()
    assert (tensors[-1], examples) == (BATCH, BATCH)
    tensors[-1].fill_(6)  # the mean with another process's
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["posterior"]["loss_examples"] == 6
