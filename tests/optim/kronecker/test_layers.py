"""K-FAC and Noisy K-FAC with BackPACK's factors: same training as with this package's, and handling of other layers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import train_on
from torch import nn

from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError, UnsupportedTrainingError
from lightning_bayes.likelihood import Categorical
from lightning_bayes.optim import KFAC, NoisyKFAC
from lightning_bayes.zoo.models import VGG16, AlexNet, LeNet5, ResNet18

F64 = torch.float64
N = 40


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def mixed():
    """BatchNorm and a grouped convolution between layers that BackPACK supports."""
    torch.manual_seed(0)
    front = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
    back = nn.Conv2d(4, 4, 2, groups=2), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    return nn.Sequential(*front, *back).double()


def batch(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=F64), torch.randint(0, 3, shape[:1], generator=generator)


def build(model, optimizer=NoisyKFAC, **arguments):
    intervals = {"stats_interval": 2, "inverse_interval": 3}
    settings = {"engine": "backpack", "lr": 0.05, "num_data": N, "damping": 0.1, **intervals}
    return optimizer(model, **{**settings, **arguments})


def train(model, opt, data, steps):
    x, y = data
    train_on(opt, lambda: F.cross_entropy(model(x), y), steps)


def factors_of(opt, layer):
    return [opt.state[layer.weight][f"{side}_factor"] for side in ("output", "input")]


@pytest.mark.parametrize("optimizer", [KFAC, NoisyKFAC])
def test_linear_layers_train_alike_by_both_engines(optimizer, same_labels):
    data = batch(6, 4)
    same_labels(data[1])
    results = []
    for engine in ("fused", "backpack"):
        model = mlp()
        opt = build(model, optimizer, engine=engine, likelihood=Categorical())
        train(model, opt, data, 5)
        results.append(model.state_dict())
    torch.testing.assert_close(*results)


def test_factors_pass_through_batch_norm_and_through_what_backpack_does_not_know(same_labels):
    """The last convolution has one position, so both engines measure the same factors, before and after BatchNorm."""
    x, y = batch(5, 2, 3, 3)
    same_labels(y)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(4, 3)
    ).double()
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    one = KFAC(ours, lr=0.05, num_data=N, damping=0.1, likelihood=Categorical())
    other = build(theirs, KFAC, unsupported_layers="fused", likelihood=Categorical())
    for net, opt in ((ours, one), (theirs, other)):
        train(net, opt, (x, y), 1)
    for index in (0, 3, 5):
        torch.testing.assert_close(factors_of(one, ours[index]), factors_of(other, theirs[index]))
    torch.testing.assert_close(one.state[ours[1].weight]["curvature"], other.state[theirs[1].weight]["curvature"])
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_layers_without_factors_are_refused_by_name_when_the_optimizer_is_built():
    with pytest.raises(
        UnsupportedLayerError, match=r"no factors for 1 \(BatchNorm2d\), 3 \(Conv2d\)\. Pass unsupported_l"
    ):
        build(mixed())


@pytest.mark.parametrize(("rule", "layers"), [("mean_field", [0, 7]), ("fused", [0, 3, 7])])
@pytest.mark.parametrize("labels", [Categorical(), None])
def test_the_other_layers_follow_the_argument(rule, layers, labels):
    model = mixed()
    opt = build(model, unsupported_layers=rule, likelihood=labels)
    train(model, opt, batch(6, 2, 3, 3), 3)
    assert [model.get_submodule(layer.name) for layer in opt.family.partition().layers] == [model[i] for i in layers]
    others = {f"{i}.{name}" for i in {1, 3} - set(layers) for name in ("weight", "bias")}
    assert {name for name, p in model.named_parameters() if "curvature" in opt.state[p]} == others
    assert all(float(opt.state[dict(model.named_parameters())[name]]["curvature"].sum()) > 0 for name in others)
    words = f"factors for {len(layers)} layers, labels drawn from the loss's likelihood (kfac by BackPACK)"
    assert words in opt.family.describe()


@pytest.mark.parametrize("factors", ["kfac", "kflr", "kfra"])
def test_resume_is_exact_and_the_global_generator_untouched(factors):
    data = batch(6, 4)

    def start():
        model = mlp()
        return model, build(model, factors=factors)

    model, opt = start()
    train(model, opt, data, 2)
    other, resumed = start()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(model, opt, data, 4)
    torch.manual_seed(5)  # does not affect the labels
    before = torch.get_rng_state()
    train(other, resumed, data, 4)
    assert torch.equal(before, torch.get_rng_state())
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_samples_and_updates_draw_labels_of_their_own(monkeypatch):
    drawn, sample = [], torch.distributions.Categorical.sample
    monkeypatch.setattr(
        torch.distributions.Categorical, "sample", lambda self, shape: drawn.append(sample(self, shape)) or drawn[-1]
    )
    model, (x, y) = mlp(), batch(64, 4)
    opt = build(model, mc_samples=2, stats_interval=1)

    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        opt.step(closure)
    assert len({tuple(labels.flatten().tolist()) for labels in drawn}) == len(drawn) == 4


def test_only_due_passes_meet_backpack():
    model, (x, y) = mlp(), batch(6, 4)
    opt = build(model, stats_interval=3, inverse_interval=3)
    hooked = []
    for _ in range(6):
        with opt.sampled_params():
            hooked.append(bool(model[0]._forward_hooks))
            F.cross_entropy(model(x), y).backward()
        opt.step()
    assert hooked == [True, False, False, True, False, False]
    assert not vars(model[0].weight)
    assert opt.state[model[0].weight]["measurements"] == 2


def test_outputs_that_are_not_finite_skip_the_update():
    model, (x, y) = mlp(), batch(6, 4)
    opt = build(model, KFAC)
    train(model, opt, (x, y), 1)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.warns(UserWarning, match="non-finite"):
            train(model, opt, (x * math.inf, y), 1)
    torch.testing.assert_close(model.state_dict(), before)


def test_a_layer_that_all_examples_share_is_refused_with_the_methods_that_take_it():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.shift = mlp(), nn.Linear(2, 4)

        def forward(self, x):
            return self.net(x + self.shift(torch.ones(1, 2)))

    model, (x, y) = Shifted(), batch(6, 4)
    opt = build(model, engine="fused")
    with pytest.raises(UnsupportedLayerError, match=r"shift.*use VOGN or IVON"), opt.sampled_params():
        F.cross_entropy(model(x), y).backward()


def test_bad_arguments_are_named():
    with pytest.raises(HyperparameterError, match="engine='fused' does not measure 'kflr'; pass engine='backpack'"):
        NoisyKFAC(mlp(), factors="kflr")
    with pytest.raises(HyperparameterError, match="factors='ggn' must be 'kfac' or 'kflr' or 'kfra'"):
        build(mlp(), factors="ggn")
    with pytest.raises(HyperparameterError, match="unsupported_layers='skip' must be 'refuse'"):
        build(mlp(), unsupported_layers="skip")
    model, (x, y) = mixed(), batch(6, 2, 3, 3)
    opt = build(model, factors="kflr", unsupported_layers="mean_field")
    match = r"BackPACK's kflr does not pass through 1 \(BatchNorm2d\)\. Use factors='kfac'"
    with pytest.raises(UnsupportedLayerError, match=match), opt.sampled_params():
        F.cross_entropy(model(x), y).backward()
    model, (x, y) = mlp(), batch(6, 4)
    opt = build(model)
    with (
        pytest.raises(UnsupportedTrainingError, match="does not support a scaled loss"),
        opt.sampled_params(loss_scale=8.0),
    ):
        (8 * F.cross_entropy(model(x), y)).backward()


def of_the_zoo(name):
    if name == "lenet":
        return LeNet5(image_size=8), (4, 1, 8, 8)
    network = {"alexnet": AlexNet, "vgg16": VGG16, "resnet18": ResNet18}[name]
    return network(num_classes=10), (2, 3, 32, 32)


@pytest.mark.parametrize("optimizer", [KFAC, NoisyKFAC])
@pytest.mark.parametrize(
    "name", ["lenet", *(pytest.param(each, marks=pytest.mark.slow) for each in ("alexnet", "vgg16", "resnet18"))]
)
def test_networks_of_the_zoo_take_a_step_or_are_refused_in_a_sentence(name, optimizer):
    torch.manual_seed(0)
    model, shape = of_the_zoo(name)
    x, y = torch.randn(shape), torch.randint(0, 10, shape[:1])
    before = copy.deepcopy(model.state_dict())
    rule = {}
    if name == "resnet18":
        with pytest.raises(
            UnsupportedLayerError, match=r"no factors for bn1 \(BatchNorm2d\).*Pass unsupported_layers="
        ):
            build(model, optimizer)
        rule = {"unsupported_layers": "mean_field"}
    opt = build(model, optimizer, **rule)
    train(model, opt, (x, y), 1)
    for key, param in model.named_parameters():
        assert param.isfinite().all()
        assert not torch.equal(param, before[key])
    assert all("output_factor" in opt.state[layer.weight] for layer in opt.family.partition().layers)
