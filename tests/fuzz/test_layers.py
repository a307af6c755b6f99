"""Any small network: its gradient and squares are those of a loop over single examples, or it is refused by name."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fuzz_settings import fuzz
from hypothesis import strategies as st
from oracles import assert_measures
from torch import nn

from lightning_bayes import VOGN, measure

small = st.integers(1, 4)


@st.composite
def one_dimensional(draw):
    """Linear layers of any widths, with and without bias, normalisations and activations between them."""
    width, layers = draw(st.integers(1, 5)), []
    shape = (width,)
    for _ in range(draw(st.integers(1, 3))):
        after = draw(st.integers(1, 5))
        layers.append(nn.Linear(width, after, bias=draw(st.booleans())))
        layers.append(draw(between(after)))
        width = after
    return shape, [*layers, nn.Linear(width, 3)]


@st.composite
def between(draw, channels):
    groups = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
    kinds = [nn.Tanh(), nn.ReLU(inplace=True), nn.PReLU(draw(st.sampled_from([1, channels])))]
    return draw(st.sampled_from([*kinds, nn.GroupNorm(groups, channels) if channels > groups else nn.Identity()]))


@st.composite
def two_dimensional(draw):
    """Convolutions with any kernel, stride, padding, dilation and groups that leave a pixel."""
    channels, size, layers = draw(small), (draw(st.integers(3, 7)), draw(st.integers(3, 7))), []
    shape = (channels, *size)
    for _ in range(draw(st.integers(1, 2))):
        groups = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
        after = groups * draw(st.integers(1, 2))
        kernel = (draw(st.integers(1, min(3, size[0]))), draw(st.integers(1, min(3, size[1]))))
        layer = nn.Conv2d(
            channels,
            after,
            kernel,
            stride=draw(st.integers(1, 2)),
            padding=draw(st.integers(0, 2)),
            dilation=1 if min(size) < 6 else draw(st.integers(1, 2)),
            groups=groups,
            bias=draw(st.booleans()),
        )
        with torch.no_grad():
            size = layer(torch.zeros(1, channels, *size)).shape[2:]
        layers += [layer, draw(between(after))]
        channels = after
    return shape, [*layers, nn.Flatten(), nn.Linear(channels * size[0] * size[1], 3)]


def network(layers, seed):
    """In double precision, with parameters drawn from the seed."""
    model, generator = nn.Sequential(*layers).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model, generator


def loss_of_one(model, example):
    x, y = example
    return F.cross_entropy(model(x[None]), y[None])


@fuzz(
    60,
    600,
    drawn=st.one_of(one_dimensional(), two_dimensional()),
    batch=st.integers(1, 6),
    seed=st.integers(0, 1000),
    reduction=st.sampled_from(["mean", "sum"]),
    engine=st.sampled_from(["fused", "fused", "backpack"]),
)
def test_any_network_is_measured_as_by_a_loop_over_examples(drawn, batch, seed, reduction, engine):
    shape, layers = drawn
    model, generator = network(layers, seed)
    x = torch.randn(batch, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (batch,), generator=generator)
    found = measure(model, lambda: F.cross_entropy(model(x), y, reduction=reduction), engine=engine)
    assert found.num_examples == batch
    assert_measures(found, model, list(zip(x, y, strict=True)), loss_of_one, 1e-8)


@fuzz(
    15, 200, drawn=st.one_of(one_dimensional(), two_dimensional()), batch=st.integers(1, 4), seed=st.integers(0, 1000)
)
def test_any_network_is_sampled_and_comes_back_to_its_mean(drawn, batch, seed):
    shape, layers = drawn
    model, generator = network(layers, seed)
    x = torch.randn(batch, *shape, generator=generator, dtype=torch.float64)
    optimizer = VOGN(model, lr=0.01, num_data=100, init_precision=50.0)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    with optimizer.sampled_params():
        inside = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        model(x).square().mean(1).mean().backward()
    after = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    assert torch.equal(after, before)
    assert not (inside == before).any()
    optimizer.step()
    assert nn.utils.parameters_to_vector(model.parameters()).isfinite().all()
