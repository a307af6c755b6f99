"""Kronecker factors by BackPACK and by this package's rules, against loops over examples, labels and positions."""

from __future__ import annotations

import math
from itertools import pairwise

import backpack
import pytest
import torch
import torch.nn.functional as F
from backpack import extensions
from random_matrices import F64, normal, seeded
from torch import nn

from lightning_bayes.curvature import KroneckerFactors, measure
from lightning_bayes.curvature.factors import split_bias
from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError, UnsupportedTrainingError

CLASSES = 5


def conv_net(conv, size, batch=3):
    """A convolution on images of a size, then ReLU and a linear layer, as BackPACK's own tests have them."""
    features = conv(torch.zeros(1, conv.in_channels, *size)).numel()
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(features, CLASSES)), (batch, conv.in_channels, *size)


def linear_net(*sides, bias=True):
    layers = [nn.Linear(*pair, bias=bias) for pair in pairwise(sides)]
    return nn.Sequential(*layers), (3, sides[0])


SETTINGS = {  # layer settings of BackPACK 1.7.1's tests of second-order quantities
    "linear": lambda: linear_net(10, CLASSES),
    "linear without bias": lambda: linear_net(10, CLASSES, bias=False),
    "two linear": lambda: linear_net(10, 7, CLASSES),
    "one example": lambda: (linear_net(7, 3, CLASSES)[0], (1, 7)),
    "conv1d": lambda: conv_net(nn.Conv1d(3, 2, 2), (7,)),
    "conv1d no bias": lambda: conv_net(nn.Conv1d(3, 2, 2, bias=False), (7,)),
    "conv1d all": lambda: conv_net(nn.Conv1d(3, 6, 2, stride=4, padding=2, dilation=3), (8,)),
    "conv1d stride": lambda: conv_net(nn.Conv1d(3, 2, 2, padding=2, dilation=1, stride=2), (7,)),
    "conv1d dilation": lambda: conv_net(nn.Conv1d(2, 3, 2, padding=0, dilation=2), (7,)),
    "conv2d": lambda: conv_net(nn.Conv2d(3, 2, 2), (7, 7)),
    "conv2d no bias": lambda: conv_net(nn.Conv2d(3, 2, 2, bias=False), (7, 7)),
    "conv2d all": lambda: conv_net(nn.Conv2d(3, 6, 2, stride=4, padding=2, dilation=3), (8, 8)),
    "conv2d stride": lambda: conv_net(nn.Conv2d(3, 2, 2, padding=0, stride=2), (7, 7)),
    "conv2d dilation": lambda: conv_net(nn.Conv2d(2, 3, 2, padding=0, dilation=2), (7, 7)),
    "conv3d": lambda: conv_net(nn.Conv3d(3, 2, 2), (2, 7, 7)),
    "conv3d no bias": lambda: conv_net(nn.Conv3d(3, 2, 2, bias=False), (2, 7, 7)),
    "conv3d all": lambda: conv_net(nn.Conv3d(3, 6, 2, padding=2, stride=4, dilation=3), (4, 8, 8)),
    "conv3d stride": lambda: conv_net(nn.Conv3d(3, 2, 2, dilation=1, padding=2, stride=3), (2, 7, 7)),
    "conv3d dilation": lambda: conv_net(nn.Conv3d(2, 3, 2, dilation=2, padding=0), (3, 7, 7)),
}


def built(name):
    model, shape = SETTINGS[name]()
    model.double()
    generator = seeded(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.5, generator=generator)
    return model, normal(*shape, generator=generator), torch.randint(0, CLASSES, shape[:1], generator=generator)


def output_gradients(model, layer, x, y):
    """δ_it of every example's own loss at a layer's output, ``[B, out, T]``, one example at a time."""
    found = []
    for i in range(len(x)):
        seen = []
        handle = layer.register_forward_hook(lambda *call, seen=seen: seen.append(call[2]))
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        handle.remove()
        (grad,) = torch.autograd.grad(loss, seen)
        found.append(grad.reshape(*grad.shape[1:2], -1))
    return torch.stack(found)


@pytest.mark.parametrize("name", SETTINGS)
def test_both_engines_are_what_they_claim_under_the_same_labels(name, same_labels):
    """A is the same; S is a mean over positions of δ δᵀ by our rules, and by BackPACK of the outer product of their sum."""
    model, x, y = built(name)
    drawn = torch.randint(0, CLASSES, y.shape, generator=seeded(7))
    same_labels(drawn)
    ours, theirs = (
        measure(model, lambda: F.cross_entropy(model(x), y), "kfac", engine=e) for e in ("fused", "backpack")
    )
    assert ours.curvature.keys() == theirs.curvature.keys() == dict(model.named_parameters()).keys()
    for label, layer in model.named_children():
        if not isinstance(layer, (nn.ReLU, nn.Flatten)):
            delta = output_gradients(model, layer, x, drawn)
            positions = delta.shape[2]
            each = torch.einsum("bot,bpt->op", delta, delta) / len(x)
            summed = torch.einsum("bo,bp->op", delta.sum(2), delta.sum(2)) / len(x)
            for found, total in ((ours.curvature, each), (theirs.curvature, summed)):
                torch.testing.assert_close(found[f"{label}.weight"].factors[0], total / positions)
                if layer.bias is not None:
                    torch.testing.assert_close(found[f"{label}.bias"].factors[0], total)
            pair = (found.curvature[f"{label}.weight"].factors[1] for found in (ours, theirs))
            torch.testing.assert_close(*pair)
            if positions == 1:
                torch.testing.assert_close(each, summed)


@pytest.mark.parametrize("quantity", ["kflr", "kfra"])
@pytest.mark.parametrize("sides", [(4, 3), (4, 5, 3), (3, 4, 4, 3)])
def test_one_example_of_a_linear_network_is_the_dense_block(quantity, sides):
    model, _ = linear_net(*sides)
    model.double()
    x, y = normal(1, sides[0], generator=seeded(0)), torch.tensor([1])
    found = measure(model, lambda: F.cross_entropy(model(x), y), quantity, engine="backpack").curvature
    out = model(x)
    probs = out.detach().softmax(1)[0]
    hessian = torch.diag(probs) - torch.outer(probs, probs)
    for name, param in model.named_parameters():
        jacobian = torch.stack([torch.autograd.grad(f, param, retain_graph=True)[0].flatten() for f in out[0]])
        factors = found[name].factors
        block = torch.kron(*factors) if len(factors) == 2 else factors[0]
        torch.testing.assert_close(block, jacobian.T @ hessian @ jacobian)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.last(hidden + self.inner(hidden))


def test_kflr_follows_branches_and_kfra_refuses_them():
    model, x, y = Residual().double(), normal(1, 3, generator=seeded(0)), torch.tensor([1])
    found = measure(model, lambda: F.cross_entropy(model(x), y), "kflr", engine="backpack").curvature
    out = model(x)[0]
    probs = out.detach().softmax(0)
    for name, param in model.named_parameters():
        jacobian = torch.stack([torch.autograd.grad(f, param, retain_graph=True)[0].flatten() for f in out])
        block = torch.kron(*found[name].factors) if name.endswith("weight") else found[name].factors[0]
        torch.testing.assert_close(block, jacobian.T @ (torch.diag(probs) - torch.outer(probs, probs)) @ jacobian)
    with pytest.raises(UnsupportedLayerError, match=r"cannot measure kfra of this model.*use engine='fused'"):
        measure(model, lambda: F.cross_entropy(model(x), y), "kfra", engine="backpack")


LOSSES = {
    "cross_entropy": (F.cross_entropy, lambda g: torch.randint(0, 3, (4,), generator=g), 3),
    "sum": (lambda f, t: F.cross_entropy(f, t, reduction="sum"), lambda g: torch.randint(0, 3, (4,), generator=g), 3),
    "mse": (F.mse_loss, lambda g: normal(4, 3, generator=g), 3),
    "bce": (
        F.binary_cross_entropy_with_logits,
        lambda g: torch.randint(0, 2, (4, 1), generator=g).to(F64),
        1,
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("engine", ["fused", "backpack"])
def test_the_mean_of_kfac_over_labels_is_kflr(engine, loss):
    function, target, outputs = LOSSES[loss]
    generator = seeded(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    x, y = normal(4, 3, generator=generator), target(generator)
    truth = measure(model, lambda: function(model(x), y), "kflr", engine="backpack").curvature
    draws = [
        measure(model, lambda: function(model(x), y), "kfac", engine=engine, seed=seed).curvature for seed in range(60)
    ]
    for name, block in truth.items():
        found = torch.stack([each[name].factors[0] for each in draws])
        error = found.std(0) / math.sqrt(len(draws))
        assert ((found.mean(0) - block.factors[0]).abs() < 4 * error + 1e-12).all()
        for ours, theirs in zip(draws[0][name].factors[1:], block.factors[1:], strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("engine", ["fused", "backpack"])
def test_many_labels_of_one_measurement_are_as_good_as_many_measurements(engine):
    model, x, y = built("two linear")
    truth = measure(model, lambda: F.cross_entropy(model(x), y), "kflr", engine="backpack").curvature
    found = measure(model, lambda: F.cross_entropy(model(x), y), "kfac", engine=engine, mc_samples=600, seed=0)
    for name, block in truth.items():
        for ours, exact in zip(found.curvature[name].factors, block.factors, strict=True):
            assert (ours - exact).norm() < 0.2 * exact.norm()


def raw_answer(model, extension, x, y):
    """What BackPACK leaves on the parameters, without this package."""
    backpack.extend(model)
    loss = backpack.extend(nn.CrossEntropyLoss())
    with backpack.backpack(extension):
        loss(model(x), y).backward()
    return {name: getattr(param, extension.savefield) for name, param in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("extension", [extensions.KFLR, extensions.KFRA])
@pytest.mark.parametrize("name", ["linear", "conv1d stride", "conv2d all"])
def test_the_factor_of_weights_is_that_of_backpack_divided_by_the_positions(name, extension):
    model, x, y = built(name)
    quantity = extension().savefield
    found = measure(model, lambda: F.cross_entropy(model(x), y), quantity, engine="backpack").curvature
    positions = model[0](x)[0, 0].numel()
    torch.set_default_dtype(F64)  # KFRA's sum of Hessians has the default dtype
    try:
        raw = raw_answer(model, extension(), x, y)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found["0.weight"].factors[0] * positions, raw["0.weight"][0])
    torch.testing.assert_close(found["0.weight"].factors[1], raw["0.weight"][1])
    torch.testing.assert_close(found["0.bias"].factors[0], raw["0.bias"][0])


@pytest.mark.parametrize("name", ["linear", "conv1d all", "conv2d stride", "conv3d all"])
def test_the_homogeneous_factor_splits_into_its_parts(name):
    from lightning_bayes.curvature.factors import input_factor

    model, x, _ = built(name)
    layer, out = model[0], model[0](x)
    positions, outputs = out[0, 0].numel(), torch.eye(layer.weight.shape[0], dtype=F64)
    whole = KroneckerFactors((outputs, input_factor(layer, x)))
    weight, bias = split_bias(whole)
    torch.testing.assert_close(weight.factors[1], input_factor(layer, x, bias=False))
    torch.testing.assert_close(bias.factors[0], positions * outputs)


@pytest.mark.parametrize("engine", ["fused", "backpack"])
def test_labels_come_from_the_seed_and_leave_the_global_generator_alone(engine):
    model, x, y = built("two linear")

    def draw(seed):
        loss = lambda: F.cross_entropy(model(x), y)  # noqa: E731
        return measure(model, loss, "kfac", engine=engine, mc_samples=20, seed=seed).curvature["0.bias"]

    state = torch.get_rng_state()
    one, same, other = draw(3).factors[0], draw(3).factors[0], draw(4).factors[0]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(draw(None).factors[0], draw(None).factors[0])


@pytest.mark.parametrize("engine", ["fused", "backpack"])
def test_a_frozen_weight_leaves_the_bias_and_a_frozen_bias_the_weight(engine):
    model, x, y = built("two linear")
    whole = measure(model, lambda: F.cross_entropy(model(x), y), "kfac", engine=engine, seed=0).curvature
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    part = measure(model, lambda: F.cross_entropy(model(x), y), "kfac", engine=engine, seed=0).curvature
    assert part.keys() == {"0.bias", "1.weight"}
    for name, block in part.items():
        torch.testing.assert_close(block.factors, whole[name].factors)


def test_what_cannot_be_measured_is_named():
    model, x, y = built("linear")

    def run(net=model, loss=F.cross_entropy, engine="fused", quantity="kfac", batch=x):
        return measure(net, lambda: loss(net(batch), y), quantity, engine=engine)

    with pytest.raises(HyperparameterError, match="engine='fused' does not measure 'kflr'; pass engine='backpack'"):
        run(quantity="kflr")
    norm = nn.Sequential(model, nn.BatchNorm1d(CLASSES).double())
    for engine in ("fused", "backpack"):
        with pytest.raises(UnsupportedLayerError, match=r"no rule of kfac for 1 \(BatchNorm1d\)\. Replace the layer"):
            run(norm, engine=engine)
        with pytest.raises(UnsupportedTrainingError, match="one supported loss function"):
            run(loss=lambda f, t: 2 * F.cross_entropy(f, t), engine=engine)
    positions = nn.Sequential(nn.Linear(10, 4), nn.Flatten(), nn.Linear(8, CLASSES)).double()
    with pytest.raises(
        UnsupportedLayerError, match=r"0 \(Linear\) got an input of shape \[3, 2, 10\], and BackPACK's kfac"
    ):
        run(positions, engine="backpack", batch=torch.stack([x, x], 1))
    run(positions, batch=torch.stack([x, x], 1))
