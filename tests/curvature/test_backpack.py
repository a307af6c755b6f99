"""The BackPACK engine with our rules and with its own, against the loop and against the fused engine."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from backpack.context import CTX
from oracles import one_example_at_a_time, relative_error
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.curvature.backpack import BackpackEngine
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError, UnsupportedTrainingError
from lightning_bayes.zoo.models import LeNet5


def squares(model, loss, own_rules=True):
    engine = BackpackEngine(model, own_rules=own_rules)
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


def out_of_place(resnet):
    """Torchvision's residual blocks with ``out + identity`` for ``out += identity``."""
    for block in resnet.modules():
        if isinstance(block, torchvision.models.resnet.BasicBlock):
            block.forward = lambda x, m=block: m.relu(
                m.bn2(m.conv2(m.relu(m.bn1(m.conv1(x))))) + (x if m.downsample is None else m.downsample(x))
            )
    return resnet


def images(generator, batch=4, size=8, channels=3):
    x = torch.randn(batch, channels, size, size, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 5, (batch,), generator=generator)


@pytest.mark.parametrize("own_rules", [True, False])
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
def test_layers_that_both_know_equal_the_loop(build, channels, own_rules, generator):
    model = build().double()
    x, y = images(generator, channels=channels)
    assert relative_error(squares(model, lambda: F.cross_entropy(model(x), y), own_rules), loop(model, x, y)) < 1e-10


def test_group_norm_network_equals_the_loop(generator):
    model = grouped().double()
    x, y = images(generator)
    assert relative_error(squares(model, lambda: F.cross_entropy(model(x), y)), loop(model, x, y)) < 1e-10


def test_layer_norm_and_embedding_equal_the_loop(generator):
    model, y = Text().double(), torch.tensor([0, 4, 2, 1])
    x = torch.randint(0, 11, (4, 7), generator=generator)
    assert relative_error(squares(model, lambda: F.cross_entropy(model(x), y)), loop(model, x, y)) < 1e-10


def test_resnet18_with_batch_norm_in_training_mode_equals_the_fused_engine(generator):
    """Per-example terms at batch statistics, which BackPACK alone refuses; truth for them is in test_measure."""
    model = out_of_place(torchvision.models.resnet18(num_classes=5)).double()
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


def refused(model, x, error, match, own_rules=True, loss=None):
    before = [dict(vars(module)) for module in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._backward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    handles = len(CTX.hook_handles)
    with pytest.raises(error, match=match):
        squares(model, loss or (lambda: model(x).square().mean()), own_rules)
    assert [dict(vars(module)) for module in model.modules()] == before
    assert hooks == [
        (len(m._forward_hooks), len(m._backward_hooks), len(m._forward_pre_hooks)) for m in model.modules()
    ]
    assert len(CTX.hook_handles) == handles
    assert not [name for p in model.parameters() for name in vars(p)]


def test_what_backpack_cannot_do_is_refused_by_name(generator):
    x = torch.randn(5, 4, generator=generator)
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    refused(nn.Sequential(a, Scale()), x, UnsupportedLayerError, r"no rule for 1 \(Scale\)\. Use engine=")
    refused(nn.Sequential(a, a), x, UnsupportedLayerError, r"0 \(Linear\) is called twice in one pass.*engine='fused'")
    refused(
        nn.Sequential(a, nn.utils.parametrizations.weight_norm(b)), x, UnsupportedLayerError, r"no rule for 1 \(Param"
    )
    b = nn.Linear(4, 4)
    b.weight = a.weight
    refused(nn.Sequential(a, b), x, UnsupportedLayerError, r"squares of tied parameters: 0\.weight = 1\.weight")
    refused(
        nn.Linear(4, 2), x[0], ExampleDimensionError, r"got an input of shape \[4\] without a dimension for examples"
    )
    model = nn.Linear(4, 2)
    by_keyword = lambda: model(input=x).square().mean()  # noqa: E731
    refused(
        model, x, UnsupportedTrainingError, r"\(Linear\) is called by keyword.*Call it as layer\(x\)", loss=by_keyword
    )


def test_residual_sum_in_place_is_refused(generator):
    model = torchvision.models.resnet18(num_classes=5)
    x = torch.randn(2, 3, 32, 32, generator=generator)
    buffers = copy.deepcopy(model.state_dict())
    with pytest.raises(
        UnsupportedTrainingError, match=r"changed in place \(such as `out \+= x`\).*Write `out = out \+ x`"
    ):
        squares(model, lambda: model(x).square().mean())
    assert all(module.inplace for module in model.modules() if isinstance(module, nn.ReLU))
    assert buffers.keys() == model.state_dict().keys()


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # torch says that CPU autocast has no float32 op list entry
def test_autocast_is_refused(generator):
    model, x = nn.Linear(4, 3), torch.randn(5, 4, generator=generator)

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    refused(model, x, UnsupportedTrainingError, "BackPACK cannot run under autocast. Train in 32-true", loss=loss)


def test_backpacks_own_layers_refuse_what_they_would_get_wrong(generator):
    """Its convolution overlooks padding modes: it would measure zeros there, silently."""
    x = torch.randn(5, 4, generator=generator)
    refused(
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), x, UnsupportedLayerError, r"no rule for 1 \(LayerNorm\)", False
    )
    message = r"no per-example gradients of BatchNorm in training mode: 0 \(BatchNorm1d\)"
    refused(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), x, UnsupportedLayerError, message, False)
    padded = nn.Sequential(nn.Conv1d(2, 3, 2, padding=1, padding_mode="circular"))
    refused(padded, x.view(5, 2, 2), UnsupportedLayerError, r"no rule for 0 \(Conv1d\)", False)
    padded = nn.Sequential(nn.ConvTranspose1d(2, 3, 2, stride=2, output_padding=1))
    refused(padded, x.view(5, 2, 2), UnsupportedLayerError, r"no rule for 0 \(ConvTranspose1d\)", False)
    tokens = torch.randint(0, 4, (5, 3), generator=generator)
    refused(nn.Sequential(nn.Embedding(4, 2, padding_idx=0)), tokens, UnsupportedLayerError, r"0 \(Embedding\)", False)


def test_model_is_left_as_it_was(generator):
    model = grouped()
    x, y = images(generator)
    before = [dict(vars(module)) for module in model.modules()]
    handles = len(CTX.hook_handles)
    measure(model.double(), lambda: F.cross_entropy(model(x), y), engine="backpack")
    assert [dict(vars(module)) for module in model.modules()] == before
    assert len(CTX.hook_handles) == handles
    assert not [name for p in model.parameters() for name in vars(p)]
