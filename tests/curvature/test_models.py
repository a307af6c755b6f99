"""Both engines on whole models, unmodified, against a loop of one example at a time."""

from __future__ import annotations

from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from oracles import one_example_at_a_time, relative_error
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.curvature.measured_modules import find_measured_modules
from lightning_bayes.zoo import models

ZOO = {  # options and the shape of one example, for each name in lightning_bayes.zoo.models
    "LeNet5": [
        ({"image_size": 8}, (1, 8, 8)),
        ({"image_size": 28}, (1, 28, 28)),
        ({"image_size": 32, "in_channels": 3}, (3, 32, 32)),
    ],
    "MLP": [({"in_features": 12, "out_features": 10}, (12,))],
    "AlexNet": [({}, (3, 32, 32))],
    "VGG16": [({"width": 0.125}, (3, 32, 32)), ({"width": 0.125, "norm": "batch"}, (3, 32, 32))],
    "ResNet18": [({}, (3, 8, 8)), ({"norm": "group", "stem": "imagenet"}, (3, 32, 32))],
}
ZOO_CASES = [
    pytest.param(partial(getattr(models, name), **options), shape, id=f"{name}-{number}")
    for name, cases in ZOO.items()
    for number, (options, shape) in enumerate(cases)
]


def from_torchvision(name, size=32, slow=False):
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(
        lambda: torchvision.models.get_model(name, num_classes=10), (3, size, size), id=name, marks=marks
    )


def from_timm(name, size=32, **options):
    return pytest.param(lambda: timm.create_model(name, num_classes=10, **options), (3, size, size), id=f"timm {name}")


LIBRARIES = [
    from_torchvision("resnet18"),
    from_torchvision("resnet50"),
    from_torchvision("mobilenet_v3_small"),
    from_torchvision("mobilenet_v3_large"),
    from_torchvision("densenet121"),
    from_timm("vit_tiny_patch16_224", img_size=32, patch_size=8),
    from_timm("resnet18"),
    from_timm("convnext_atto", size=64),
    from_torchvision("alexnet", size=64, slow=True),  # 57 million parameters
    from_torchvision("vgg16_bn", slow=True),  # 134 million
]
OWN_PARAMETERS = {"VisionTransformer", "ConvNeXtBlock", "LayerNorm2d"}  # LayerNorm2d changes LayerNorm's forward


def build_batch(build, shape, generator, batch):
    """The model with running statistics in use, and a batch of its inputs and labels."""
    x = torch.randn(batch, *shape, generator=generator)
    return build().eval(), x, torch.randint(0, 10, (batch,), generator=generator)


def classify(model, example):
    x, y = example
    return F.cross_entropy(model(x[None]), y[None])


def test_every_zoo_model_has_a_case():
    assert set(ZOO) == set(models.__all__)


@pytest.mark.parametrize(("build", "shape"), [*ZOO_CASES, *LIBRARIES])
def test_a_model_equals_the_loop(build, shape, generator):
    model, x, y = build_batch(build, shape, generator, batch=2)
    grad, square = one_example_at_a_time(model, list(zip(x, y, strict=True)), classify)
    for engine in ("fused", "backpack"):
        measured = measure(model, lambda: F.cross_entropy(model(x), y), engine=engine)
        assert relative_error(measured.grad, grad) < 1e-5
        assert relative_error(measured.curvature, square) < 1e-5


@pytest.mark.parametrize(("build", "shape"), LIBRARIES)
def test_only_modules_that_hold_parameters_of_their_own_fall_to_the_generic_rule(build, shape):
    generic = {type(unit.module).__name__ for unit in find_measured_modules(build()) if unit.rule is None}
    assert generic <= OWN_PARAMETERS


def test_tokens_and_positions_of_a_vision_transformer_leave_its_layers_their_rules():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, depth=1)
    without_rule = [unit for unit in find_measured_modules(model, at_operations=True) if unit.rule is None]
    assert [(unit.label, set(unit.params)) for unit in without_rule] == [
        ("the model itself (VisionTransformer)", {"cls_token", "pos_embed"})
    ]


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_shares_at_batch_statistics_add_up_to_the_gradient_of_the_batch(name, generator):
    model, x, y = build_batch(lambda: torchvision.models.get_model(name, num_classes=10), (3, 32, 32), generator, 4)
    model, x = model.double().train(), x.double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    loss = F.cross_entropy(model(x), y)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    measured = measure(model, lambda: F.cross_entropy(model(x), y))
    for (key, _), grad in zip(model.named_parameters(), grads, strict=True):
        torch.testing.assert_close(measured.grad[key], grad, rtol=1e-9, atol=1e-12)
        assert (measured.curvature[key] >= measured.grad[key].square() * (1 - 1e-9)).all()  # Jensen
