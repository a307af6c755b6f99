"""BackPACK's rules, and our rules for the layers that it does not have, against the loop and against the fused engine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torchvision
from oracles import relative_error
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.curvature.backpack import BackpackEngine
from lightning_bayes.curvature.rules import rule_for
from lightning_bayes.zoo.models import LeNet5


def grouped():
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.GroupNorm(2, 8), nn.ReLU(inplace=True)),
        *(nn.Conv2d(8, 6, 3, groups=2, stride=2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(54, 5)),
    )


def images(generator, batch=4, size=8, channels=3):
    x = torch.randn(batch, channels, size, size, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 5, (batch,), generator=generator)


def test_resnet18_with_batch_norm_in_training_mode_equals_the_fused_engine(generator):
    """BackPACK measures the convolutions, and our rule BatchNorm; its blocks run ``out += identity``."""
    model = torchvision.models.resnet18(num_classes=5).double()
    x, y = images(generator, size=32)
    by_fused = measure(model, lambda: F.cross_entropy(model(x), y))
    by_backpack = measure(model, lambda: F.cross_entropy(model(x), y), engine="backpack")
    assert relative_error(by_backpack.curvature, by_fused.curvature) < 1e-8
    assert relative_error(by_backpack.grad, by_fused.grad) < 1e-8


def test_an_input_by_keyword_is_measured_as_by_the_fused_engine(generator):
    class ByKeyword(nn.Sequential):
        def forward(self, x):
            return self[0](input=x)

    model, x = ByKeyword(nn.Linear(4, 3)).double(), torch.randn(5, 4, generator=generator, dtype=torch.float64)
    by_fused = measure(model, lambda: model(x).square().mean())
    by_backpack = measure(model, lambda: model(x).square().mean(), engine="backpack")
    assert relative_error(by_backpack.curvature, by_fused.curvature) < 1e-10


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
    (unit,) = BackpackEngine.find_units(nn.Sequential(layer))
    assert (unit.rule is not rule_for(layer)) is is_backpacks


def test_a_small_workspace_splits_the_batch(generator):
    model = LeNet5(image_size=8, num_classes=5).double()
    x, y = images(generator, channels=1)
    whole, parts = (
        measure(model, lambda: F.cross_entropy(model(x), y), engine="backpack", workspace_mib=mib).curvature
        for mib in (64, 1e-3)
    )
    assert relative_error(parts, whole) < 1e-10
