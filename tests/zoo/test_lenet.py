from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_bayes.zoo.models import LeNet5
from lightning_bayes.zoo.models.norms import FilterResponseNorm

NORMS = ("batch", "group", "filter_response")


@pytest.mark.parametrize(("size", "paddings", "features"), [(8, (2, 2), 64), (28, (2, 0), 400), (32, (0, 0), 400)])
def test_equals_the_stated_sequence_of_layers(size, paddings, features):
    torch.manual_seed(0)
    net = LeNet5(num_classes=7, in_channels=2, image_size=size)
    conv1 = nn.Conv2d(2, 6, 5, padding=paddings[0])
    conv2 = nn.Conv2d(6, 16, 5, padding=paddings[1])
    fcs = [nn.Linear(features, 120), nn.Linear(120, 84), nn.Linear(84, 7)]
    convolutions = [conv1, nn.ReLU(), nn.MaxPool2d(2), conv2, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    stated = nn.Sequential(*convolutions, fcs[0], nn.ReLU(), fcs[1], nn.ReLU(), fcs[2])
    stated.load_state_dict(dict(zip(stated.state_dict(), net.state_dict().values(), strict=True)))
    images = torch.randn(3, 2, size, size)
    torch.testing.assert_close(net(images), stated(images))


def test_with_batch_norm_equals_the_stated_sequence_of_layers(generator):
    net = LeNet5(num_classes=7, in_channels=3, image_size=32, norm="batch")
    convolutions = [
        *(nn.Conv2d(3, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
    ]
    linear = [nn.Linear(400, 120), nn.BatchNorm1d(120), nn.ReLU(), nn.Linear(120, 84), nn.BatchNorm1d(84), nn.ReLU()]
    stated = nn.Sequential(*convolutions, nn.Flatten(), *linear, nn.Linear(84, 7))
    stated.load_state_dict(dict(zip(stated.state_dict(), net.state_dict().values(), strict=True)))
    images = torch.randn(4, 3, 32, 32, generator=generator)
    torch.testing.assert_close(net(images), stated(images))


@pytest.mark.parametrize("norm", NORMS)
def test_all_parameters_of_a_norm_are_trained(norm, generator):
    net = LeNet5(image_size=8, norm=norm)
    assert set(LeNet5(image_size=8).state_dict()) < set(net.state_dict())
    net(torch.randn(4, 1, 8, 8, generator=generator)).logsumexp(1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    assert [name for name, p in net.named_parameters() if "bn" in name and not p.grad.any()] == []


@pytest.mark.parametrize("norm", ["group", "filter_response"])
def test_without_batch_norm_examples_are_independent(norm, generator):
    net, images = LeNet5(image_size=8, norm=norm), torch.randn(4, 1, 8, 8, generator=generator)
    torch.testing.assert_close(net(images)[2:3], net(images[2:3]))


def test_filter_response_norm_follows_only_convolutions():
    found = {name for name, m in LeNet5(norm="filter_response").named_modules() if isinstance(m, FilterResponseNorm)}
    assert found == {"bn1", "bn2"}
