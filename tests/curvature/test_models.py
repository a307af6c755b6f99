"""The fused engine on whole models, unmodified, against a loop of one example at a time and against torch.func."""

from __future__ import annotations

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
    pytest.param(name, options, shape, id=f"{name}-{number}")
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


def build_batch(build, shape, generator, batch=3):
    """The model with running statistics in use, and a batch of its inputs and labels."""
    x = torch.randn(batch, *shape, generator=generator)
    return build().eval(), x, torch.randint(0, 10, (batch,), generator=generator)


def classify(model, example):
    x, y = example
    return F.cross_entropy(model(x[None]), y[None])


def by_torch_func(model, x, y):
    """Mean gradient and mean squared gradient by `vmap(grad)` of the whole model."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p, one_x, one_y):
        return F.cross_entropy(torch.func.functional_call(model, p, (one_x[None],)), one_y[None])

    each = torch.vmap(torch.func.grad(loss), (None, 0, 0))(params, x, y)
    return {k: g.mean(0) for k, g in each.items()}, {k: g.square().mean(0) for k, g in each.items()}


def assert_equal(measured, truth):
    grad, square = truth
    assert relative_error(measured.grad, grad) < 1e-5
    assert relative_error(measured.curvature, square) < 1e-5


def test_every_zoo_model_has_a_case():
    assert set(ZOO) == set(models.__all__)


@pytest.mark.parametrize("engine", ["fused", "backpack"])
@pytest.mark.parametrize(("name", "options", "shape"), ZOO_CASES)
def test_zoo_model_equals_the_loop_and_torch_func(name, options, shape, engine, generator):
    model, x, y = build_batch(lambda: getattr(models, name)(**options), shape, generator)
    measured = measure(model, lambda: F.cross_entropy(model(x), y), engine=engine)
    assert_equal(measured, one_example_at_a_time(model, list(zip(x, y, strict=True)), classify))
    assert_equal(measured, by_torch_func(model, x, y))


# torch says that vmap, the truth here, has no batching rule for attention on CPU.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("build", "shape"), LIBRARIES)
def test_library_model_equals_the_loop_and_torch_func(build, shape, generator):
    model, x, y = build_batch(build, shape, generator, batch=2)
    measured = measure(model, lambda: F.cross_entropy(model(x), y))
    assert_equal(measured, one_example_at_a_time(model, list(zip(x, y, strict=True)), classify))
    assert_equal(measured, by_torch_func(model, x, y))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id, marks=case.marks) for case in LIBRARIES])
def test_library_model_with_backpack_equals_the_loop(case, generator):
    build, shape = case.values
    model, x, y = build_batch(build, shape, generator, batch=2)
    measured = measure(model, lambda: F.cross_entropy(model(x), y), engine="backpack")
    assert_equal(measured, one_example_at_a_time(model, list(zip(x, y, strict=True)), classify))


@pytest.mark.parametrize(("build", "shape"), LIBRARIES)
def test_only_modules_that_hold_parameters_of_their_own_fall_to_the_generic_rule(build, shape):
    generic = {type(unit.module).__name__ for unit in find_measured_modules(build()) if unit.rule is None}
    assert generic <= OWN_PARAMETERS


def test_vision_transformer_is_one_generic_unit():
    """It holds its class token and position embedding itself, so all of it is replayed example by example."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, depth=1)
    assert [unit.label for unit in find_measured_modules(model)] == ["the model itself (VisionTransformer)"]


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
