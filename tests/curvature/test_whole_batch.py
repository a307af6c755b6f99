"""Parameters beside BatchNorm, at the statistics of the batch, and of modules that draw noise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import one_example_at_a_time
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.errors import ExampleDimensionError


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        return x * self.gamma[:, None, None]


class Block(nn.Module):
    """A residual branch with BatchNorm, whose scale the block holds itself or, for comparison, a child of it."""

    def __init__(self, own, noise=0.0):
        super().__init__()
        self.mix, self.norm, self.noise = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout(noise)
        if own:
            self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, 3))
        else:
            self.scale = Scale(3)

    def forward(self, x):
        found = F.gelu(self.norm(self.mix(x)))
        found = self.scale(found) if hasattr(self, "scale") else found * self.gamma[:, None, None]
        return self.noise(found) + x


class Shift(nn.Module):
    """A parameter before BatchNorm and one behind it."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.norm(torch.tanh(x * self.before)) + self.after)


def network(own, **options):
    torch.manual_seed(0)
    return nn.Sequential(
        Block(own, **options), nn.ReLU(), Block(own, **options), nn.Flatten(), nn.Linear(48, 5)
    ).double()


@pytest.fixture
def batch(generator):
    x = torch.randn(6, 3, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (6,), generator=generator)


def named(found):
    """By names that do not say who holds a scale."""
    return {name.replace("scale.", ""): value for name, value in found.items()}


@pytest.mark.parametrize("twice", [False, True])
def test_a_scale_that_a_block_holds_is_measured_as_one_of_a_module_of_its_own(batch, twice):
    x, y = batch
    found = []
    for own in (True, False):
        model = network(own)
        if twice:
            model[2] = model[0]
        found.append(measure(model, lambda model=model: F.cross_entropy(model(x), y)))
    for key in ("grad", "curvature"):
        torch.testing.assert_close(named(getattr(found[0], key)), named(getattr(found[1], key)), rtol=1e-9, atol=1e-15)


def test_parameters_on_either_side_of_batch_norm_equal_parameters_of_each_example(generator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Shift()).double()
    x, y = torch.randn(7, 4, generator=generator).double(), torch.randint(3, (7,), generator=generator)
    own = {name: getattr(model[1], name).detach().expand(7, 4).clone().requires_grad_() for name in ("before", "after")}
    output = torch.func.functional_call(model[1], own, (model[0](x),))
    grads = torch.autograd.grad(F.cross_entropy(output, y), list(own.values()))
    measured = measure(model, lambda: F.cross_entropy(model(x), y))
    for name, grad in zip(own, grads, strict=True):  # n c_i is the gradient of an example's loss
        torch.testing.assert_close(measured.curvature[f"1.{name}"], 7 * grad.square().sum(0), rtol=1e-9, atol=1e-15)


def test_in_evaluation_mode_it_equals_the_loop(batch):
    x, y = batch
    model = network(own=True)
    with torch.no_grad():
        model(x)  # running statistics
    model.eval()
    pairs = list(zip(x.split(1), y.split(1), strict=True))
    grad, square = one_example_at_a_time(model, pairs, lambda m, e: F.cross_entropy(m(e[0]), e[1]))
    measured = measure(model, lambda: F.cross_entropy(model(x), y))
    torch.testing.assert_close(dict(measured.grad), grad, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(dict(measured.curvature), square, rtol=1e-8, atol=1e-12)


def test_noise_is_that_of_the_forward_and_the_statistics_move_once(batch):
    x, y = batch
    model, plain = network(own=True, noise=0.5), network(own=True, noise=0.5)
    torch.manual_seed(3)
    expected = torch.autograd.grad(F.cross_entropy(plain(x), y), list(plain.parameters()))
    after = torch.get_rng_state()
    torch.manual_seed(3)
    measured = measure(model, lambda: F.cross_entropy(model(x), y))
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(list(measured.grad.values()), list(expected), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()), rtol=0, atol=0)


class Noisy(nn.Module):
    """A module without children that draws noise."""

    def __init__(self, turns):
        super().__init__()
        self.scale, self.turns = nn.Parameter(torch.ones(4)), turns

    def forward(self, x):
        found = F.dropout(x, 0.5) * self.scale
        return found.t() if self.turns else found


def test_examples_in_another_dimension_are_refused(generator):
    model, x = Noisy(turns=True), torch.randn(5, 4, generator=generator)
    with pytest.raises(ExampleDimensionError, match=r"Noisy got 5 examples and returned a tensor of shape \[4, 5\]"):
        measure(model, lambda: model(x).square().sum(0).mean())


def test_the_noise_of_a_module_without_children_is_repeated(generator):
    model, x = Noisy(turns=False), torch.randn(5, 4, generator=generator)
    torch.manual_seed(0)
    expected = (2 * F.dropout(x, 0.5).square()).square().mean(0)
    torch.manual_seed(0)
    measured = measure(model, lambda: model(x).square().sum(1).mean())
    torch.testing.assert_close(measured.curvature["scale"], expected)
