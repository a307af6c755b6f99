"""Kronecker factors against loops over examples, and against the exact Fisher where theory says they are equal."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from random_matrices import F64, normal, seeded
from torch import nn

from lightning_bayes.curvature.factors import FactorMoments, Request, Scales, has_factors, input_factor
from lightning_bayes.curvature.workspace import Workspace

CASES = {
    "linear": (nn.Linear(3, 4), (3,)),
    "linear without bias": (nn.Linear(3, 4, bias=False), (3,)),
    "linear with positions": (nn.Linear(3, 4), (2, 5, 3)),
    "conv1d": (nn.Conv1d(2, 4, 3, stride=2, padding=1), (2, 9)),
    "conv2d": (nn.Conv2d(2, 4, (3, 2), dilation=(1, 2), padding="valid"), (2, 6, 7)),
    "conv2d same": (nn.Conv2d(2, 4, (3, 2), padding="same", dilation=(1, 2), bias=False), (2, 4, 5)),
    "conv2d reflect": (nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), (2, 4, 5)),
    "conv2d groups": (nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 5, 4)),
    "conv2d depthwise": (nn.Conv2d(3, 3, 2, groups=3), (3, 4, 4)),
    "conv3d": (nn.Conv3d(2, 3, 2, stride=(1, 2, 1)), (2, 3, 4, 3)),
}


def case(name, batch=5):
    layer, shape = CASES[name]
    layer, x = layer.double(), normal(batch, *shape, generator=seeded(0))
    delta = normal(*layer(x).shape, generator=seeded(1))
    return layer, x, delta


def factors_of(layer, x, delta):
    """S and A of a call whose output gradients δ are those of the examples' own losses."""
    records = FactorMoments(Request({layer: True}), Workspace())
    records.add(layer, x, delta)
    return records.results(Scales(own=1.0, factor=1.0, gradient=1.0))[layer].factors


def groups_of(layer):
    return getattr(layer, "groups", 1)


def per_example_gradients(layer, x, delta):
    """[B, groups, out / groups, K], bias last, by one autograd call for each example."""
    found = []
    for one_x, one_delta in zip(x, delta, strict=True):
        grads = torch.autograd.grad((layer(one_x[None]) * one_delta[None]).sum(), list(layer.parameters()))
        matrix = torch.cat([g.flatten(1) if g.dim() > 1 else g[:, None] for g in grads], 1)
        found.append(matrix.unflatten(0, (groups_of(layer), -1)))
    return torch.stack(found)


def vectors_by_position(layer, x, delta):
    """Lists of (ā, δ) for each example and group, found by probing: δ of one position at a time recovers its ā."""
    _, groups, rows, columns = per_example_gradients(layer, x[:1], delta[:1]).shape
    conv = isinstance(layer, nn.modules.conv._ConvNd)
    moved = delta.flatten(2) if conv else delta.flatten(1, -2).mT if delta.dim() > 2 else delta[..., None]
    for i in range(len(x)):
        for t in range(moved.shape[2]):
            probe = torch.zeros_like(moved[:1])
            probe[..., t] = 1
            shaped = probe if conv else probe.mT
            each = per_example_gradients(layer, x[i : i + 1], shaped.reshape(delta[:1].shape))[0]
            yield each[:, 0], moved[i, :, t].view(groups, rows)
    assert columns == each.shape[-1]


@pytest.mark.parametrize("name", CASES)
def test_factors_are_means_over_examples_of_explicit_outer_products(name):
    """A sums over the T positions, S averages over them (Grosse & Martens 2016): the scale table's KFC row."""
    layer, x, delta = case(name, batch=3)
    pairs = list(vectors_by_position(layer, x, delta))
    inputs, outputs = (torch.stack(side, 1) for side in zip(*pairs, strict=True))  # [groups, B · T, …]
    expected = outputs.mT @ outputs / len(pairs), inputs.mT @ inputs / len(x)
    for ours, truth in zip(factors_of(layer, x, delta), expected, strict=True):
        torch.testing.assert_close(ours, truth if groups_of(layer) > 1 else truth[0])


@pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d groups"])
def test_the_workspace_changes_memory_and_nothing_else(name):
    layer, x, _ = case(name, batch=7)
    torch.testing.assert_close(input_factor(layer, x, workspace=Workspace(1e-5)), input_factor(layer, x))


def test_large_factors_are_symmetric_second_moments():
    layer, x = nn.Linear(301, 2).double(), normal(7, 301, generator=seeded(0))
    found, rows = input_factor(layer, x), torch.cat([x, torch.ones(7, 1, dtype=F64)], 1)
    torch.testing.assert_close(found, rows.T @ rows / 7)
    assert torch.equal(found, found.T)


def dense(layer, x, delta):
    left, right = factors_of(layer, x, delta)
    return torch.kron(left, right) if left.dim() == 2 else torch.stack(list(map(torch.kron, left, right)))


@pytest.mark.parametrize("name", ["linear", "linear without bias"])
def test_one_example_is_exact(name):
    layer, x, delta = case(name, batch=1)
    grad = per_example_gradients(layer, x, delta)[0, 0].flatten()
    torch.testing.assert_close(dense(layer, x, delta), torch.outer(grad, grad))


def test_a_deep_linear_network_with_gaussian_noise_is_exact():
    """There δ depends on the noise of the label alone, a on the input alone, so E[S ⊗ A] factorises.

    Every input meets every noise vector ±√d e_j, whose second moment is exactly the identity; std 1.
    """
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2)).double()
    noise = torch.cat([torch.eye(2, dtype=F64), -torch.eye(2, dtype=F64)]) * 2**0.5
    x = normal(6, 3, generator=seeded(0)).repeat_interleave(4, 0)
    kept = {}
    for layer in net:
        layer.register_forward_hook(lambda m, args, out: kept.__setitem__(m, (args[0], out)) or out.retain_grad())
    outputs = net(x)
    targets = outputs.detach() + noise.repeat(6, 1)
    (0.5 * (outputs - targets).square().sum()).backward()  # a sum: every example's own gradient
    for layer, (inputs, out) in kept.items():
        grads = per_example_gradients(layer, inputs.detach(), out.grad).flatten(1)
        fisher = grads.T @ grads / len(x)
        torch.testing.assert_close(dense(layer, inputs.detach(), out.grad), fisher)


def test_the_scale_is_that_of_the_mean_over_examples():
    """The trace of S ⊗ A of independent rows estimates mean_i |g_i|², whatever the batch size."""
    layer = nn.Linear(3, 4).double()
    x, delta = normal(20000, 3, generator=seeded(0)), normal(20000, 4, generator=seeded(1))
    squares = delta.square().sum(1) * (x.square().sum(1) + 1)
    error = squares.std() / len(x) ** 0.5
    left, right = factors_of(layer, x, delta)
    assert abs(left.trace() * right.trace() - squares.mean()) < 4 * error
    torch.testing.assert_close(factors_of(layer, x.repeat(2, 1), delta.repeat(2, 1)), (left, right))


def test_layers_that_compute_something_else_have_no_factors():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert all(has_factors(layer) for layer, _ in CASES.values())
    others = [Scaled(2, 3), nn.BatchNorm1d(3), nn.ConvTranspose1d(2, 2, 2), nn.Embedding(3, 2)]
    assert not any(map(has_factors, others))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")  # emitted when curvlinops is imported
def test_factors_agree_with_curvlinops():
    from curvlinops import KFACLinearOperator

    model, x = nn.Sequential(nn.Linear(3, 4)).double(), normal(8, 3, generator=seeded(0))
    y = torch.arange(8) % 4
    operator = KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        [(x, y)],
        fisher_type="empirical",
        separate_weight_and_bias=False,
    )
    out = model(x)
    (delta,) = torch.autograd.grad(F.cross_entropy(out, y, reduction="sum"), out)
    grads = normal(16, generator=seeded(1))
    weight, bias = grads[:12], grads[12:]
    matrix = torch.cat([weight.view(4, 3), bias[:, None]], 1)
    left, right = factors_of(model[0], x, delta)
    ours = left @ matrix @ right
    torch.testing.assert_close(operator @ grads, torch.cat([ours[:, :-1].flatten(), ours[:, -1]]))
