"""BackPACK's rules, and our rules for the layers that it does not have, against the loop and against the fused engine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torchvision
from backpack.context import CTX
from oracles import one_example_at_a_time, relative_error
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.curvature.backpack import BackpackEngine
from lightning_bayes.curvature.rules import rule_for
from lightning_bayes.zoo.models import LeNet5


def squares(model, loss):
    engine = BackpackEngine(model)
    model.zero_grad()
    with engine.capture() as captured:
        value = loss()
        captured.observe(value)
        value.backward()
    engine.check_reached(captured)
    found = captured.mean_curvature()
    return {name: found[p] for name, p in model.named_parameters() if p in found}


def classify(model, example):
    return F.cross_entropy(model(example[0][None]), example[1][None])


def loop(model, x, y):
    return one_example_at_a_time(model, list(zip(x, y, strict=True)), classify)[1]


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.norm(self.hidden(self.embed(x)).relu()).mean(1))


def grouped():
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.GroupNorm(2, 8), nn.ReLU(inplace=True)),
        *(nn.Conv2d(8, 6, 3, groups=2, stride=2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(54, 5)),
    )


def images(generator, batch=4, size=8, channels=3):
    x = torch.randn(batch, channels, size, size, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 5, (batch,), generator=generator)


@pytest.mark.parametrize(
    ("build", "channels"),
    [
        (lambda: LeNet5(image_size=8, num_classes=5), 1),
        (
            lambda: nn.Sequential(
                nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 5)
            ).eval(),
            3,
        ),
        (
            lambda: nn.Sequential(nn.ConvTranspose2d(3, 2, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(578, 5)),
            3,
        ),
    ],
    ids=["LeNet5", "BatchNorm", "ConvTranspose"],
)
def test_layers_that_both_know_equal_the_loop(build, channels, generator):
    model = build().double()
    x, y = images(generator, channels=channels)
    assert relative_error(squares(model, lambda: F.cross_entropy(model(x), y)), loop(model, x, y)) < 1e-10


def test_group_norm_network_equals_the_loop(generator):
    model = grouped().double()
    x, y = images(generator)
    assert relative_error(squares(model, lambda: F.cross_entropy(model(x), y)), loop(model, x, y)) < 1e-10


def test_layer_norm_and_embedding_equal_the_loop(generator):
    model, y = Text().double(), torch.tensor([0, 4, 2, 1])
    x = torch.randint(0, 11, (4, 7), generator=generator)
    assert relative_error(squares(model, lambda: F.cross_entropy(model(x), y)), loop(model, x, y)) < 1e-10


def test_resnet18_with_batch_norm_in_training_mode_equals_the_fused_engine(generator):
    """BackPACK measures the convolutions, and our rule BatchNorm; its blocks run ``out += identity``."""
    model = torchvision.models.resnet18(num_classes=5).double()
    x, y = images(generator, size=32)
    by_fused = measure(model, lambda: F.cross_entropy(model(x), y))
    by_backpack = measure(model, lambda: F.cross_entropy(model(x), y), engine="backpack")
    assert relative_error(by_backpack.curvature, by_fused.curvature) < 1e-8
    assert relative_error(by_backpack.grad, by_fused.grad) < 1e-8


def test_only_what_requires_gradients_is_measured(generator):
    model = grouped().double()
    model[1].bias.requires_grad_(False)
    model[3].requires_grad_(False)
    x, y = images(generator)
    found = squares(model, lambda: F.cross_entropy(model(x), y))
    assert relative_error(found, loop(model, x, y)) < 1e-10
    assert not {"1.bias", "3.weight", "3.bias"} & found.keys()


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.scale * x


def once_by_keyword():
    class ByKeyword(nn.Sequential):
        def forward(self, x):
            return self[0](input=x)

    return ByKeyword(nn.Linear(4, 3))


def twice():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(inplace=True), layer)


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), Scale()),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4)),
        *(once_by_keyword, twice, tied),
    ],
    ids=["no rule", "parametrised", "norms", "keyword", "twice", "tied"],
)
def test_what_backpack_does_not_have_equals_the_fused_engine(build, generator):
    model, x = build().double(), torch.randn(5, 4, generator=generator, dtype=torch.float64)
    by_fused = measure(model, lambda: model(x).square().mean())
    by_backpack = measure(model, lambda: model(x).square().mean(), engine="backpack")
    assert relative_error(by_backpack.curvature, by_fused.curvature) < 1e-10


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # torch says that CPU autocast has no float32 op list entry
def test_under_autocast_it_equals_the_fused_engine(generator):
    model, x = nn.Linear(4, 3), torch.randn(5, 4, generator=generator)

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    by_fused, by_backpack = measure(model, loss), measure(model, loss, engine="backpack")
    assert relative_error(by_backpack.curvature, by_fused.curvature) < 1e-6


@pytest.mark.parametrize(
    ("layer", "is_backpacks"),
    [
        (nn.Linear(4, 4), True),
        (nn.Conv1d(2, 3, 2, padding=1), True),
        (nn.BatchNorm1d(4).eval(), True),
        (nn.LayerNorm(4), False),
        (nn.BatchNorm1d(4), False),
        (nn.Conv1d(2, 3, 2, padding=1, padding_mode="circular"), False),  # it would measure zeros there, silently
        (nn.ConvTranspose1d(2, 3, 2, stride=2, output_padding=1), False),
        (nn.Embedding(4, 2), False),
    ],
    ids=lambda value: str(value),
)
def test_backpack_measures_the_layers_that_it_has(layer, is_backpacks):
    (unit,) = BackpackEngine(nn.Sequential(layer)).units()
    assert (unit.rule is not rule_for(layer)) is is_backpacks


def test_model_is_left_as_it_was(generator):
    model = grouped()
    x, y = images(generator)
    before = [dict(vars(module)) for module in model.modules()]
    handles = len(CTX.hook_handles)
    measure(model.double(), lambda: F.cross_entropy(model(x), y), engine="backpack")
    assert [dict(vars(module)) for module in model.modules()] == before
    assert len(CTX.hook_handles) == handles
    assert not [name for p in model.parameters() for name in vars(p)]


def test_a_small_workspace_splits_the_batch(generator):
    model = LeNet5(image_size=8, num_classes=5).double()
    x, y = images(generator, channels=1)
    whole, parts = (
        measure(model, lambda: F.cross_entropy(model(x), y), engine="backpack", workspace_mib=mib).curvature
        for mib in (64, 1e-3)
    )
    assert relative_error(parts, whole) < 1e-10
