"""Both engines against a loop of autograd calls, over models and situations."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from oracles import one_example_at_a_time, relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_bayes.curvature import measure
from lightning_bayes.errors import (
    ExampleDimensionError,
    HyperparameterError,
    NoMeasurementError,
    ShapeError,
    UnsupportedTrainingError,
)
from lightning_bayes.zoo.models import LeNet5

BOUND = {torch.float32: 1e-5, torch.float64: 1e-10}


class Text(nn.Module):
    """An MLP with Embedding (with padding) and LayerNorm over [batch, positions, features]."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.hidden = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.norm(self.hidden(self.embed(x)).relu()).mean(1))


def tokens(batch, generator):
    return torch.randint(0, 11, (batch, 7), generator=generator)


def images(batch, size, dtype, generator, channels=3):
    return torch.randn(batch, channels, size, size, generator=generator, dtype=dtype)


def labels(batch, classes, generator):
    return torch.randint(0, classes, (batch,), generator=generator)


def classify(model, example):
    x, y = example
    return F.cross_entropy(model(x[None]), y[None])


def assert_equals_loop(model, x, y, *, found_from=None, engine="fused"):
    measured = measure(found_from or model, lambda: F.cross_entropy((found_from or model)(x), y), engine=engine)
    grad, square = one_example_at_a_time(model, list(zip(x, y, strict=True)), classify)
    bound = BOUND[next(model.parameters()).dtype]
    assert relative_error(measured.grad, grad) < bound
    assert relative_error(measured.curvature, square) < bound
    assert measured.num_examples == len(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("engine", ["fused", "backpack"])
def test_lenet_equals_the_loop(dtype, engine, generator):
    model = LeNet5(image_size=8).to(dtype)
    assert_equals_loop(model, images(6, 8, dtype, generator, channels=1), labels(6, 10, generator), engine=engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mlp_with_layer_norm_and_embedding_equals_the_loop(dtype, generator):
    assert_equals_loop(Text().to(dtype), tokens(6, generator), labels(6, 5, generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "size"), [("resnet18", 32), pytest.param("alexnet", 64, marks=pytest.mark.slow)])
def test_torchvision_model_equals_the_loop_in_eval_mode(name, size, dtype, generator):
    model = torchvision.models.get_model(name, num_classes=10).to(dtype).eval()
    assert_equals_loop(model, images(3, size, dtype, generator), labels(3, 10, generator))


@pytest.mark.slow  # 134 million parameters, which in double precision take 9 GiB
def test_vgg16_equals_the_loop(generator):
    model = torchvision.models.vgg16(num_classes=10).eval()
    assert_equals_loop(model, images(2, 32, torch.float32, generator), labels(2, 10, generator))


def test_vgg16_features_equal_the_loop(generator):
    """The quick twin of the test above: all of VGG16's convolutions, a small classifier."""
    model = torchvision.models.vgg16(num_classes=10).double()
    model.avgpool, model.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(512, 10).double()
    assert_equals_loop(model.eval(), images(2, 32, torch.float64, generator), labels(2, 10, generator))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2, bias=False),
        nn.Conv2d(4, 4, (3, 5), padding="same", groups=4),
        nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="circular"),
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 6, 1),
        nn.Conv2d(4, 6, 7, padding="valid"),  # one position
        nn.Conv2d(4, 6, 5, stride=2, groups=2),  # four positions
        nn.Conv2d(4, 6, (7, 5)),  # three positions
        nn.GroupNorm(2, 4),
        nn.BatchNorm2d(4).eval(),
        nn.Conv2d(4, 6, 3, bias=False),
        nn.ConvTranspose2d(4, 3, 3, stride=2),
        nn.PReLU(4),
        nn.InstanceNorm2d(4, affine=True),
    ],
    ids=str,
)
def test_layer_equals_the_loop(layer, generator):
    for param in layer.parameters():
        nn.init.normal_(param, generator=generator)
    model = nn.Sequential(layer, nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(3)).double()
    x = images(5, 7, torch.float64, generator, channels=4)
    model(x)
    assert_equals_loop(model, x, labels(5, 3, generator))


def analytic_batch_norm_squares(model, x, y):
    """Example i's term of the batch gradient at the batch's statistics, by freezing these statistics."""
    frozen = copy.deepcopy(model)
    pre, norm = frozen[:2](x), frozen[1]
    del pre
    hidden = frozen[0](x)
    variance, mean = torch.var_mean(hidden, (0, 2, 3), correction=0)
    # Term i of the gradient of γ and β: chain rule by hand behind the normalisation.
    normalized = (hidden - mean[:, None, None]) * torch.rsqrt(variance + norm.eps)[:, None, None]
    normalized = normalized.detach()
    scaled = (norm.weight[:, None, None] * normalized + norm.bias[:, None, None]).detach().requires_grad_()
    loss = F.cross_entropy(frozen[3:](frozen[2](scaled.clone())), y, reduction="sum")
    (delta,) = torch.autograd.grad(loss, scaled)
    weight, bias = (delta * normalized).sum((2, 3)), delta.sum((2, 3))
    return {"1.weight": weight.square().mean(0), "1.bias": bias.square().mean(0)}


def test_batch_norm_in_training_mode_equals_the_term_at_batch_statistics(generator):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 36, 5)
    ).double()
    nn.init.normal_(model[1].weight, generator=generator)
    x, y = images(6, 8, torch.float64, generator), labels(6, 5, generator)
    expected = F.cross_entropy(copy.deepcopy(model)(x), y)
    truth = analytic_batch_norm_squares(model, x, y)
    reference = copy.deepcopy(model)
    F.cross_entropy(reference(x), y).backward()
    measured = measure(model, lambda: F.cross_entropy(model(x), y))
    torch.testing.assert_close(measured.loss, expected.detach())
    assert relative_error({k: measured.curvature[k] for k in truth}, truth) < 1e-10
    grads = {k: p.grad for k, p in reference.named_parameters() if k != "0.bias"}  # BatchNorm cancels this bias: 0
    assert relative_error({k: measured.grad[k] for k in grads}, grads) < 1e-10
    assert model[1].num_batches_tracked == 1


def test_frozen_layers_are_left_out(generator):
    model = LeNet5(image_size=8).double()
    first = next(m for m in model.modules() if isinstance(m, nn.Conv2d)).requires_grad_(False)
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    last.bias.requires_grad_(False)
    x, y = images(4, 8, torch.float64, generator, channels=1), labels(4, 10, generator)
    measured = measure(model, lambda: F.cross_entropy(model(x), y))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert len(frozen) == 3
    assert not frozen & measured.grad.keys()
    assert first.weight.grad is None
    assert_equals_loop(model, x, y)


class Reuse(nn.Module):
    """One layer used twice, and one weight shared by two layers of different types."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.mix(self.mix(self.embed(x)).tanh()).mean(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reused_module_and_tied_weights_equal_the_loop(dtype, generator):
    assert_equals_loop(Reuse().to(dtype), tokens(6, generator), labels(6, 11, generator))


class TwoForwards(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))

    def forward(self, x):
        return self.net(x[:, 0]) - self.net(x[:, 1])


def test_two_forwards_add_up_per_example_before_the_square(generator):
    x = torch.randn(6, 2, 4, generator=generator, dtype=torch.float64)
    assert_equals_loop(TwoForwards().double(), x, labels(6, 3, generator))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = x.requires_grad_()  # a reentrant checkpoint needs an input with gradients
        twice = checkpoint(lambda z: self.a(self.a(z).tanh()), x, use_reentrant=self.reentrant)
        return self.b(checkpoint(self.a, twice, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant, generator):
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    target = labels(6, 3, generator)
    model = Checkpointed(reentrant).double()
    measured = measure(model, lambda: F.cross_entropy(model(x.clone()), target))
    plain = copy.deepcopy(model)
    plain.forward = lambda z: plain.b(plain.a(plain.a(plain.a(z).tanh())))
    grad, square = one_example_at_a_time(plain, list(zip(x, target, strict=True)), classify)
    assert relative_error(measured.grad, grad) < 1e-10
    assert relative_error(measured.curvature, square) < 1e-10


class Residual(nn.Module):
    """In-place ReLU and in-place residual addition."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(3, 4)

    def forward(self, x):
        out = self.relu(self.conv1(x))
        out = self.conv2(out)
        out += x
        return self.head(self.relu(out).mean((2, 3)))


def test_in_place_operations_equal_the_loop(generator):
    assert_equals_loop(Residual().double(), images(5, 6, torch.float64, generator), labels(5, 4, generator))


class Attention(nn.Module):
    def __init__(self, batch_first, dropout=0.0):
        super().__init__()
        self.batch_first = batch_first
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first, dropout=dropout)
        self.rnn = nn.GRU(6, 4, batch_first=batch_first)

    def forward(self, x):
        x = x if self.batch_first else x.transpose(0, 1)
        x = x + self.attention(x, x, x)[0]
        x = self.rnn(x)[0]
        return x.mean(1 if self.batch_first else 0)


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_and_recurrence_equal_the_loop_through_the_generic_rule(batch_first, generator):
    x = torch.randn(5, 3, 6, generator=generator, dtype=torch.float64)
    assert_equals_loop(Attention(batch_first).double(), x, labels(5, 4, generator))


def test_generic_rule_repeats_the_dropout_of_the_forward(generator):
    """With dropout the only truth is consistency: the gradient is that of the very loss that was computed."""
    model = Attention(True, dropout=0.5).double()
    x, y = torch.randn(5, 3, 6, generator=generator, dtype=torch.float64), labels(5, 4, generator)
    state = torch.get_rng_state()
    measured = measure(model, lambda: F.cross_entropy(model(x), y))
    end_state = torch.get_rng_state()
    name, step = "attention.in_proj_weight", 1e-6
    direction = torch.randn(18, 6, generator=generator, dtype=torch.float64)
    losses = []
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        dict(moved.named_parameters())[name].data.add_(sign * step * direction)
        torch.set_rng_state(state)
        losses.append(measure(moved, lambda m=moved: F.cross_entropy(m(x), y)).loss)
    slope = (losses[0] - losses[1]) / (2 * step)
    torch.testing.assert_close((measured.grad[name] * direction).sum(), slope, rtol=1e-5, atol=1e-8)
    assert not torch.equal(state, end_state)  # the masks came from the global generator, as always


class Scaled(nn.Module):
    """A parameter held directly by a module that has children."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(self.scale * x)


def test_directly_held_parameter_equals_the_loop(generator):
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    assert_equals_loop(nn.Sequential(Scaled(), nn.Linear(3, 3)).double(), x, labels(5, 3, generator))


def test_weight_norm_equals_the_loop(generator):
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    assert_equals_loop(nn.Sequential(layer).double(), x, labels(5, 3, generator))


def test_sum_reduction_equals_the_loop(generator):
    model, x, y = LeNet5(image_size=8).double(), images(5, 8, torch.float64, generator, 1), labels(5, 10, generator)
    measured = measure(model, lambda: F.cross_entropy(model(x), y, reduction="sum"))
    grad, square = one_example_at_a_time(model, list(zip(x, y, strict=True)), classify)
    assert relative_error(measured.grad, grad) < 1e-10
    assert relative_error(measured.curvature, square) < 1e-10


@pytest.mark.parametrize(
    "reduce", [lambda v: v.sum(), lambda v: v.mean(), lambda v: v.sum() / len(v)], ids=["sum", "mean", "divided sum"]
)
def test_hand_reduced_losses_equal_the_loop(reduce, generator):
    model, x, y = nn.Linear(4, 3).double(), torch.randn(5, 4, generator=generator).double(), labels(5, 3, generator)
    measured = measure(model, lambda: reduce(F.cross_entropy(model(x), y, reduction="none")))
    grad, square = one_example_at_a_time(model, list(zip(x, y, strict=True)), classify)
    assert relative_error(measured.grad, grad) < 1e-10
    assert relative_error(measured.curvature, square) < 1e-10


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ignored_examples_do_not_count(reduction, generator):
    model, x, y = LeNet5(image_size=8).double(), images(6, 8, torch.float64, generator, 1), labels(6, 10, generator)
    y[[1, 4]] = -100
    measured = measure(model, lambda: F.cross_entropy(model(x), y, reduction=reduction))
    kept = [(a, b) for a, b in zip(x, y, strict=True) if b != -100]
    grad, square = one_example_at_a_time(model, kept, classify)
    assert measured.num_examples == 4
    assert relative_error(measured.grad, grad) < 1e-10
    assert relative_error(measured.curvature, square) < 1e-10


def test_ignored_positions_of_sequences(generator):
    """The loss averages over tokens: example i's loss is its share of that mean, times the number of examples."""
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 5)).double()
    x, y = tokens(4, generator), torch.randint(0, 5, (4, 7), generator=generator)
    y[0, 3:], y[2] = -100, -100  # example 2 does not count at all
    measured = measure(model, lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    total = int((y != -100).sum())
    share = lambda m, e: 3 * F.cross_entropy(m(e[0][None])[0], e[1], reduction="sum") / total  # noqa: E731
    grad, square = one_example_at_a_time(model, [(x[i], y[i]) for i in (0, 1, 3)], share)
    assert measured.num_examples == 3
    assert relative_error(measured.grad, grad) < 1e-10
    assert relative_error(measured.curvature, square) < 1e-10


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: F.mse_loss(out, y),
        lambda out, y: F.mse_loss(out, y, reduction="sum"),
        lambda out, y: F.binary_cross_entropy_with_logits(out, y.sigmoid()),
        lambda out, y: F.smooth_l1_loss(out, y),
        lambda out, y: F.gaussian_nll_loss(out, y, torch.ones_like(y)),
        lambda out, y: F.cross_entropy(out, y.softmax(-1), label_smoothing=0.1),
        lambda out, y: F.cross_entropy(out, y.argmax(-1), label_smoothing=0.1, reduction="sum"),
        lambda out, y: 0.5 * F.mse_loss(out, y) + F.cross_entropy(out, y.argmax(-1)),
        lambda out, y: F.mse_loss(out, y).sum(),
        lambda out, y: torch.stack([F.mse_loss(out, y), F.cross_entropy(out, y.argmax(-1))]).sum(),
        lambda out, y: (torch.stack([F.mse_loss(out, y), F.l1_loss(out, y)]) * torch.tensor([1.0, 0.5])).sum(),
        lambda out, y: torch.stack([F.mse_loss(out, y, reduction="sum"), F.l1_loss(out, y, reduction="sum")]).mean(),
    ],
)
def test_losses_of_torch_equal_the_loop(loss, generator):
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)[:, :, :4]
    y = y[:, :3]
    measured = measure(model, lambda: loss(model(x), y))
    each = list(zip(x, y, strict=True))
    grad, square = one_example_at_a_time(model, each, lambda m, e: loss(m(e[0][None]), e[1][None]))
    assert relative_error(measured.grad, grad) < 1e-10
    assert relative_error(measured.curvature, square) < 1e-10


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # torch says that CPU autocast has no float32 op list entry
def test_bf16_autocast_squares_are_taken_in_float32(generator):
    model = LeNet5(image_size=8)
    x, y = images(6, 8, torch.float32, generator, 1), labels(6, 10, generator)

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x), y)

    measured = measure(model, loss)
    _, square = one_example_at_a_time(model, list(zip(x, y, strict=True)), classify)
    assert all(h.dtype == torch.float32 for h in measured.curvature.values())
    assert relative_error(measured.curvature, square) < 0.05  # bf16 activations carry 8 bits


def test_gradient_by_inputs_is_not_taken_for_a_measurement(generator):
    """Adversarial training differentiates by the input first; only the backward into parameters counts."""
    model, y = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)).double(), labels(5, 3, generator)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64, requires_grad=True)

    def adversarial_loss():
        (by_input,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        return F.cross_entropy(model((x + 0.1 * by_input.sign()).detach()), y)

    (by_input,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    moved = (x + 0.1 * by_input.sign()).detach()
    measured = measure(model, adversarial_loss)
    _, square = one_example_at_a_time(model, list(zip(moved, y, strict=True)), classify)
    assert relative_error(measured.curvature, square) < 1e-10


@pytest.mark.parametrize("compiled_before", [True, False])
def test_compiled_model_equals_the_loop(compiled_before, generator):
    torch.compiler.reset()
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 5)).double()
    x, y = images(6, 8, torch.float64, generator, 1), labels(6, 5, generator)
    compiled = torch.compile(model, backend="aot_eager")
    if compiled_before:
        compiled(x)
    measured = measure(model, lambda: F.cross_entropy(compiled(x), y))
    grad, square = one_example_at_a_time(model, list(zip(x, y, strict=True)), classify)
    assert relative_error(measured.grad, grad) < 1e-10
    assert relative_error(measured.curvature, square) < 1e-10


def test_permuting_examples_changes_nothing(generator):
    model, x, y = LeNet5(image_size=8).double(), images(6, 8, torch.float64, generator, 1), labels(6, 10, generator)
    order = torch.randperm(6, generator=generator)
    one = measure(model, lambda: F.cross_entropy(model(x), y))
    other = measure(model, lambda: F.cross_entropy(model(x[order]), y[order]))
    assert relative_error(other.curvature, one.curvature) < 1e-12


def test_model_and_gradients_are_left_as_they_were(generator):
    model = LeNet5(image_size=8)
    x, y = images(3, 8, torch.float32, generator, 1), labels(3, 10, generator)
    kept = torch.ones_like(next(model.parameters()))
    next(model.parameters()).grad = kept
    before = [dict(vars(module)) for module in model.modules()]
    measure(model, lambda: F.cross_entropy(model(x), y))
    assert [dict(vars(module)) for module in model.modules()] == before
    assert next(model.parameters()).grad is kept
    with pytest.raises(ZeroDivisionError):
        measure(model, lambda: 1 / 0)
    assert [dict(vars(module)) for module in model.modules()] == before


class PenaltyOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.log_noise = nn.Linear(4, 1), nn.ParameterList([nn.Parameter(torch.zeros(1))])

    def forward(self, x):
        return self.body(x)


@pytest.mark.filterwarnings("ignore:log_noise.0. all examples share:UserWarning")
def test_parameter_outside_of_layers_is_followed(generator):
    model, x = PenaltyOutside(), torch.randn(5, 4, generator=generator)
    by_hand = lambda m, x: (m(x) * m.log_noise[0].exp()).mean()  # noqa: E731
    _, square = one_example_at_a_time(model, list(x.split(1)), by_hand)
    for engine in ("fused", "backpack"):
        assert relative_error(measure(model, lambda: by_hand(model, x), engine=engine).curvature, square) < 1e-5


@pytest.mark.filterwarnings("ignore:position:UserWarning")
def test_positions_that_all_examples_share_are_followed(generator):
    class Positions(Text):
        def __init__(self):
            super().__init__()
            self.position = nn.Embedding(7, 6)

        def forward(self, x):
            return self.head(self.norm(self.hidden(self.embed(x) + self.position(torch.arange(7)))).mean(1))

    model, x, y = Positions(), tokens(4, generator), labels(4, 5, generator)
    classify = lambda m, e: F.cross_entropy(m(e[0]), e[1])  # noqa: E731
    _, square = one_example_at_a_time(model, list(zip(x.split(1), y.split(1), strict=True)), classify)
    for engine in ("fused", "backpack"):
        found = measure(model, lambda: F.cross_entropy(model(x), y), engine=engine).curvature
        assert relative_error(found, square) < 1e-5


def test_module_that_mixes_examples_is_refused(generator):
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return self.weight * (x - x.mean(0))

    model, x = Mixing(), torch.randn(5, 4, generator=generator)
    with pytest.raises(ExampleDimensionError, match=r"per-example gradients of Mixing\.weight do not add up"):
        measure(model, lambda: (model(x) ** 3).mean())


def test_two_backwards_in_one_pass_are_refused(generator):
    model, x = nn.Linear(4, 1), torch.randn(5, 4, generator=generator)

    def loss():
        out = model(x).mean()
        out.backward(retain_graph=True)
        return out

    with pytest.raises(UnsupportedTrainingError, match="second backward reached a parameter"):
        measure(model, loss)


def test_bad_arguments_are_named(generator):
    model, x = nn.Linear(4, 2), torch.randn(5, 4, generator=generator)
    with pytest.raises(HyperparameterError, match="engine='opacus' is unknown; use 'fused' or 'backpack'"):
        measure(model, lambda: model(x).mean(), engine="opacus")
    with pytest.raises(HyperparameterError, match="quantity='hessian' is unknown"):
        measure(model, lambda: model(x).mean(), "hessian")
    with pytest.raises(HyperparameterError, match="loss_reduction='max' is unknown"):
        measure(model, lambda: model(x).mean(), loss_reduction="max")
    with pytest.raises(ShapeError, match=r"The loss has shape \(5, 2\)"):
        measure(model, lambda: model(x))
    with pytest.raises(UnsupportedTrainingError, match="reduced by 'sum' to one reduced by 'mean'"):
        measure(model, lambda: F.mse_loss(model(x), x[:, :2]) + F.mse_loss(model(x), x[:, :2], reduction="sum"))
    with pytest.raises(NoMeasurementError, match="No trainable layer was called"):
        measure(model, lambda: torch.ones((), requires_grad=True) * 2)


def test_batch_that_is_not_finite_passes_through_the_generic_rule(generator):
    """Skipping it is the optimizer's business; the check of the sum waits for a finite batch."""
    model, x = nn.Sequential(Scaled()), torch.full((5, 4), torch.nan)
    assert measure(model, lambda: model(x).mean()).curvature["0.scale"].isnan().all()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(4, 1), (4,)), (nn.Conv2d(3, 1, 3), (3, 5, 5)), (nn.LayerNorm((2, 4)), (2, 4))],
    ids=str,
)
def test_input_without_examples_is_refused_by_name(layer, shape, generator):
    model, x = nn.Sequential(layer), torch.randn(shape, generator=generator)
    name = type(layer).__name__
    message = rf"0 \({name}\) got an input of shape \[{', '.join(map(str, shape))}\] without a dimension for examples"
    with pytest.raises(ExampleDimensionError, match=message):
        measure(model, lambda: model(x).square().mean())


def test_empty_batch_is_refused():
    model, x = nn.Linear(4, 2), torch.zeros(0, 4)
    with pytest.raises(
        ExampleDimensionError, match=r"The batch holds no example \(seen by the model itself \(Linear\)\)"
    ):
        measure(model, lambda: model(x).sum())


def test_transformer_with_the_batch_in_dimension_one_is_refused(generator):
    """With as many positions as examples nothing else would tell."""
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), nn.Linear(4, 2))
    x = torch.randn(5, 5, 4, generator=generator)
    with pytest.raises(ExampleDimensionError, match="does not keep the examples apart"):
        measure(model, lambda: model(x).square().mean())


def test_transformer_layer_equals_the_loop(generator):
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    x = torch.randn(5, 3, 4, generator=generator, dtype=torch.float64)
    measured = measure(model, lambda: model(x).square().mean())
    each = lambda m, e: m(e[None]).square().mean()  # noqa: E731
    grad, square = one_example_at_a_time(model, list(x), each)
    assert relative_error(measured.grad, grad) < 1e-10
    assert relative_error(measured.curvature, square) < 1e-10
