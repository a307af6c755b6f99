"""The convolutional models against torchvision, the papers' layouts and published parameter counts."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torchvision
from torch import nn

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.zoo.models import VGG16, AlexNet, LeNet5, ResNet18
from lightning_bayes.zoo.models.norms import FilterResponseNorm, make_norm

SMALL = {
    "LeNet5": lambda: LeNet5(in_channels=3, image_size=32),
    "AlexNet": AlexNet,
    "VGG16": lambda: VGG16(width=0.5),
    "VGG16 with BatchNorm": lambda: VGG16(norm="batch", width=0.5),
    "VGG16 with Xavier's weights": lambda: VGG16(width=0.5, init="xavier"),
    "VGG16 with GroupNorm": lambda: VGG16(norm="group", width=0.5),
    "VGG16 with filter responses": lambda: VGG16(norm="filter_response", width=0.5),
    "ResNet18": ResNet18,
    "ResNet18 with the ImageNet stem": lambda: ResNet18(stem="imagenet"),
    "ResNet18 with GroupNorm": lambda: ResNet18(norm="group"),
    "ResNet18 with filter responses": lambda: ResNet18(norm="filter_response"),
    "ResNet18 without norm": lambda: ResNet18(norm="none"),
}
# The hidden linear layers need most of the memory; on the meta device they need none.
IMAGENET = {
    "alexnet": lambda: AlexNet(num_classes=1000, image_size=224),
    "vgg16": lambda: VGG16(num_classes=1000, image_size=224),
    "vgg16_bn": lambda: VGG16(num_classes=1000, image_size=224, norm="batch"),
    "resnet18": lambda: ResNet18(num_classes=1000, stem="imagenet"),
}


def count(model):
    return sum(p.numel() for p in model.parameters())


def without_storage(build):
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize(
    ("build", "number"),
    [
        (AlexNet, 2_472_266),  # 2.47 M in the tables of bearpaw/pytorch-classification
        (lambda: VGG16(norm="batch"), 14_728_266),  # kuangliu/pytorch-cifar
        (ResNet18, 11_173_962),  # kuangliu/pytorch-cifar
        (lambda: LeNet5(in_channels=3, image_size=32), 62_006),  # Osawa et al. 2019
    ],
)
def test_has_the_published_number_of_parameters(build, number):
    assert count(without_storage(build)) == number


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "name", ["alexnet", "resnet18", *(pytest.param(n, marks=pytest.mark.slow) for n in ("vgg16", "vgg16_bn"))]
)
def test_the_imagenet_variant_loads_torchvisions_weights_and_computes_the_same(name, training, generator):
    theirs = torchvision.models.get_model(name, weights=None).train(training)
    ours = IMAGENET[name]().train(training)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    for dropout in (m for model in (ours, theirs) for m in model.modules() if isinstance(m, nn.Dropout)):
        dropout.eval()
    images = torch.randn(2, 3, 224, 224, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))


def test_alexnet_on_cifar_equals_the_stated_sequence_of_layers(generator):
    relu, pool = nn.ReLU(), nn.MaxPool2d(2)
    convolutions = [
        *(nn.Conv2d(3, 64, 11, stride=4, padding=5), relu, pool),
        *(nn.Conv2d(64, 192, 5, padding=2), relu, pool),
        *(nn.Conv2d(192, 384, 3, padding=1), relu),
        *(nn.Conv2d(384, 256, 3, padding=1), relu),
        *(nn.Conv2d(256, 256, 3, padding=1), relu, pool),
    ]
    assert_equals_sequence(AlexNet(), nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 10)), generator)


def test_half_width_vgg16_equals_the_stated_sequence_of_layers(generator):
    layers, channels = [], 3
    for filters in (32, 32, "M", 64, 64, "M", *[128] * 3, "M", *[256] * 3, "M", *[256] * 3, "M"):
        if filters == "M":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, filters, 3, padding="same"), nn.BatchNorm2d(filters), nn.ReLU()]
            channels = filters
    stated = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))
    assert_equals_sequence(VGG16(norm="batch", width=0.5), stated, generator)


def test_the_network_of_zhang_et_al_has_fixed_norms_and_xavier_weights():
    """Weights uniform within ±√(6 / (fan in + fan out)), biases 0, BatchNorm's scale 1 and shift 0, untrained."""
    torch.manual_seed(0)
    model = VGG16(norm="batch", width=0.5, train_norm=False, init="xavier")
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 13
    assert all((m.weight == 1).all() and (m.bias == 0).all() for m in norms)
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    assert frozen == {id(p) for m in norms for p in m.parameters()}
    for layer in (m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))):
        outputs, inputs, *kernel = layer.weight.shape
        uniform = layer.weight / math.sqrt(6 / (math.prod(kernel) * (inputs + outputs)))
        assert uniform.abs().max() <= 1
        # A uniform variable on ±1 has the variance 1/3, and its square the variance 4/45.
        assert abs(uniform.square().mean() - 1 / 3) < 4 * math.sqrt(4 / 45 / uniform.numel())
        assert (layer.bias == 0).all()


def assert_equals_sequence(model, stated, generator):
    stated.load_state_dict(dict(zip(stated.state_dict(), model.state_dict().values(), strict=True)))
    images = torch.randn(3, 3, 32, 32, generator=generator)
    torch.testing.assert_close(model(images), stated(images))


def test_the_cifar_stem_keeps_the_size_of_the_image(generator):
    model, seen = ResNet18(), []
    model.layer1.register_forward_hook(lambda _, inputs, output: seen.append(output.shape[2:]))
    model.layer4.register_forward_hook(lambda _, inputs, output: seen.append(output.shape[2:]))
    model(torch.randn(2, 3, 32, 32, generator=generator))
    assert seen == [(32, 32), (4, 4)]


@pytest.mark.parametrize("name", SMALL)
def test_returns_logits_and_a_gradient_for_every_parameter(name, generator):
    model = SMALL[name]()
    logits = model(torch.randn(2, 3, 32, 32, generator=generator))
    assert logits.shape == (2, 10)
    logits.logsumexp(1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", [n for n in SMALL if "without norm" not in n])
def test_activations_neither_vanish_nor_explode_at_the_start(name, generator):
    seen = []
    model = SMALL[name]()
    for layer in (m for m in model.modules() if isinstance(m, nn.Conv2d)):
        layer.register_forward_hook(lambda _, inputs, output: seen.append(output.std().item()))
    model(torch.randn(4, 3, 32, 32, generator=generator))
    assert 1e-3 < min(seen) <= max(seen) < 1e3


@pytest.mark.parametrize("name", SMALL)
def test_has_no_in_place_operations(name):
    """BackPACK's hooks forbid in-place operations: `out += x` or inplace=True raises in forward."""
    model = SMALL[name]()
    assert not [m for m in model.modules() if getattr(m, "inplace", False)]
    for layer in (m for m in model.modules() if not list(m.children())):
        layer.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    model(torch.randn(2, 3, 32, 32, requires_grad=True)).sum().backward()


def test_filter_response_norm_has_unit_mean_square_and_treats_examples_independently(generator):
    norm, images = FilterResponseNorm(4), 7 * torch.randn(3, 4, 5, 5, generator=generator)
    torch.testing.assert_close(norm(images).square().mean((2, 3)), torch.ones(3, 4))
    torch.testing.assert_close(norm(images)[1:2], norm(images[1:2]))


def test_group_norm_has_at_most_32_groups_of_at_least_two_channels():
    """A group of one channel is an InstanceNorm, under which the preceding convolution's bias has no gradient."""
    assert [make_norm("group", c).num_groups for c in (512, 64, 32, 48, 7, 5, 1)] == [32, 32, 16, 8, 1, 1, 1]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LeNet5(image_size=16), r"LeNet5 got image_size=16, but supports 8, 28, 32\. Resize"),
        (lambda: LeNet5(num_classes=0), r"LeNet5 got num_classes=0 and in_channels=1; both must be at least 1"),
        (lambda: AlexNet(image_size=64), r"AlexNet got image_size=64, but supports 32, 224\. Resize"),
        (lambda: VGG16(image_size=28), r"VGG16 got image_size=28, but supports 32, 224\. Resize"),
        (lambda: VGG16(width=0.0), r"VGG16 got width=0\.0, which leaves no filters\. Use 1\.0 or 0\.5"),
        (lambda: VGG16(init="he"), r"VGG16 got init='he'; use 'kaiming' or 'xavier'"),
        (lambda: VGG16(norm="layer"), r"norm='layer' is unknown; use one of none, batch, group, filter_response"),
        (lambda: ResNet18(stem="mnist"), r"ResNet18 got stem='mnist'; use 'cifar' or 'imagenet'"),
        (lambda: ResNet18(num_classes=0), r"ResNet18 got num_classes=0 and in_channels=3; both must be at least 1"),
        (lambda: VGG16(in_channels=0), r"VGG16 got num_classes=10 and in_channels=0; both must be at least 1"),
        (lambda: AlexNet(num_classes=-1), r"AlexNet got num_classes=-1 and in_channels=3; both must be at least 1"),
    ],
)
def test_an_unknown_variant_is_rejected(build, message):
    with pytest.raises(HyperparameterError, match=message):
        build()


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (
            LeNet5(image_size=32),
            (2, 3, 32, 32),
            "LeNet5 was built for images [batch, 1, 32, 32], but got [2, 3, 32, 32].",
        ),
        (AlexNet(), (2, 3, 28, 28), "AlexNet was built for images [batch, 3, 32, 32], but got [2, 3, 28, 28]. Set"),
        (
            VGG16(width=0.5),
            (2, 1, 32, 32),
            "VGG16 was built for images [batch, 3, 32, 32], but got [2, 1, 32, 32]. Set",
        ),
        (
            ResNet18(),
            (2, 1, 9, 9),
            "ResNet18 was built for images [batch, 3, height, width], but got [2, 1, 9, 9]. Set",
        ),
        (ResNet18(), (3, 32, 32), "ResNet18 was built for images [batch, 3, height, width], but got [3, 32, 32]. Set"),
    ],
)
def test_images_of_a_different_shape_are_rejected(model, shape, message):
    with pytest.raises(ShapeError, match=re.escape(message)):
        model(torch.zeros(shape))
