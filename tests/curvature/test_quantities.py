"""Second-order quantities against explicit Jacobians and Hessians, and sampled labels against the exact Fisher."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import torchvision
from backpack.context import CTX
from oracles import relative_error
from torch import nn

from lightning_bayes.curvature import KroneckerFactors, measure
from lightning_bayes.curvature.measurement import SecondOrderDiagonal
from lightning_bayes.errors import (
    ExampleDimensionError,
    HyperparameterError,
    ShapeError,
    UnsupportedLayerError,
    UnsupportedTrainingError,
)
from lightning_bayes.likelihood import Bernoulli, Categorical, Gaussian, Poisson

SAMPLES = 400


def each_example(model, x, y, loss):
    """Yield ∂f/∂θ by parameter, ``[outputs, *shape]``, and ∂²ℓ/∂f², ``[outputs, outputs]``, of every example."""
    params = dict(model.named_parameters())
    for i in range(len(x)):
        out = model(x[i : i + 1])
        rows = [torch.autograd.grad(f, list(params.values()), retain_graph=True) for f in out.flatten()]
        jacobian = {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(params)}
        target = y[i : i + 1]
        hessian = torch.autograd.functional.hessian(lambda f, t=target: loss(f, t), out.detach())
        yield jacobian, hessian.reshape(out.numel(), out.numel())


def ggn_blocks(model, x, y, loss):
    """(1/n) Σ_i J_iᵀ H_i J_i of each parameter, ``[numel, numel]``."""
    blocks = {name: torch.zeros(p.numel(), p.numel(), dtype=p.dtype) for name, p in model.named_parameters()}
    for jacobian, hessian in each_example(model, x, y, loss):
        for name, j in jacobian.items():
            blocks[name] += j.flatten(1).T @ hessian @ j.flatten(1) / len(x)
    return blocks


def ggn_diagonals(model, x, y, loss):
    truth = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for jacobian, hessian in each_example(model, x, y, loss):
        for name, j in jacobian.items():
            truth[name] += torch.einsum("c...,cd,d...->...", j, hessian, j) / len(x)
    return truth


def hessian_diagonals(model, x, y, loss):
    """Diagonal of the Hessian of the mean over examples."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    diagonals = {}
    for name, p in params.items():

        def mean(q, name=name):
            outputs = [torch.func.functional_call(model, {**params, name: q}, (x[i : i + 1],)) for i in range(len(x))]
            return torch.stack([loss(out, y[i : i + 1]) for i, out in enumerate(outputs)]).mean()

        diagonals[name] = torch.autograd.functional.hessian(mean, p).reshape(p.numel(), p.numel()).diagonal().view_as(p)
    return diagonals


class Functional(nn.Module):
    """A residual network that calls its operations as functions, and one activation twice."""

    def __init__(self, outputs=3):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm, self.act, self.head = nn.BatchNorm2d(3).eval(), nn.ReLU(inplace=True), nn.Linear(3, outputs)
        self.eval()

    def forward(self, x):
        x = self.act(self.norm(self.conv1(x)))
        x = F.avg_pool2d(self.act(self.conv2(x) + x), 2)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Smooth(nn.Module):
    """Activations with curvature, under which the Hessian is not the GGN."""

    def __init__(self, outputs=3):
        super().__init__()
        self.conv, self.mid, self.head = nn.Conv2d(2, 2, 3), nn.Linear(8, 4), nn.Linear(4, outputs)
        self.shape = nn.Sequential(nn.Sigmoid(), nn.MaxPool2d(2), nn.Flatten())

    def forward(self, x):
        return self.head(self.mid(self.shape(self.conv(x))).tanh())


def data(generator, batch=5, size=6, classes=3):
    x = torch.randn(batch, 2, size, size, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, classes, (batch,), generator=generator)


def randomised(model, generator):
    for p in model.parameters():
        nn.init.normal_(p, std=0.5, generator=generator)
    return model.double()


LOSSES = {
    "cross_entropy": (F.cross_entropy, lambda y: y),
    "label_smoothing": (lambda f, t, **k: F.cross_entropy(f, t, label_smoothing=0.2, **k), lambda y: y),
    "mse": (F.mse_loss, lambda y: F.one_hot(y, 3).double()),
    "bce": (F.binary_cross_entropy_with_logits, lambda y: (y[:, None] > 0).double()),  # BackPACK knows one logit
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("quantity", "build", "truth"),
    [
        ("diag_ggn", Functional, ggn_diagonals),
        ("diag_ggn", Smooth, ggn_diagonals),
        ("diag_hessian", Smooth, hessian_diagonals),
    ],
)
def test_diagonals_equal_explicit_matrices(quantity, build, truth, loss, generator):
    model = randomised(build(1 if loss == "bce" else 3), generator)
    function, target = LOSSES[loss]
    x, y = data(generator)
    y = target(y)
    measured = measure(model, lambda: function(model(x), y), quantity, engine="backpack")
    assert measured.num_examples == len(x)
    assert relative_error(measured.curvature, truth(model, x, y, function)) < 1e-10
    fused = measure(model, lambda: function(model(x), y))
    assert relative_error(measured.grad, fused.grad) < 1e-10
    torch.testing.assert_close(measured.loss, fused.loss)


@pytest.mark.parametrize("quantity", ["diag_ggn", "diag_hessian", "kflr", "kfra"])
def test_sum_reduction_gives_the_same_means(quantity, generator):
    model = randomised(Smooth(), generator)
    x, y = data(generator)
    loss = nn.CrossEntropyLoss(reduction="sum")
    by_sum = measure(model, lambda: loss(model(x), y), quantity, engine="backpack")
    by_mean = measure(model, lambda: F.cross_entropy(model(x), y), quantity, engine="backpack")
    assert relative_error(by_sum.grad, by_mean.grad) < 1e-10
    assert relative_error(dense(by_sum), dense(by_mean)) < 1e-10


def dense(measured):
    def matrix(value):
        if not isinstance(value, KroneckerFactors):
            return value
        first, *rest = value.factors
        return torch.kron(first, rest[0]) if rest else first

    return {name: matrix(value) for name, value in measured.curvature.items()}


def test_kronecker_factors_of_biases_are_exact_for_many_examples(generator):
    """A linear layer's bias block has one factor, which KFLR averages over the examples exactly."""
    model = randomised(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), generator)
    x, y = torch.randn(6, 4, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    measured = measure(model, lambda: F.cross_entropy(model(x), y), "kflr", engine="backpack")
    truth = ggn_blocks(model, x, y, F.cross_entropy)
    found = dense(measured)
    assert (
        relative_error({k: found[k] for k in ("0.bias", "2.bias")}, {k: truth[k] for k in ("0.bias", "2.bias")}) < 1e-10
    )
    inputs = x.T @ x / len(x)
    torch.testing.assert_close(measured.curvature["0.weight"].factors[1], inputs)


def test_kfra_averages_over_examples_at_every_layer(generator):
    """By hand for two layers: S₂ = mean H_i, S₁ = mean_i D_i Wᵀ S₂ W D_i with D_i the slope of the activation."""
    model = randomised(nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3)), generator)
    x, y = torch.randn(6, 4, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    found = measure(model, lambda: F.cross_entropy(model(x), y), "kfra", engine="backpack").curvature
    hidden, probs = model[:2](x).detach(), model(x).detach().softmax(1)
    last = (torch.diag_embed(probs) - probs[:, :, None] * probs[:, None, :]).mean(0)
    inner = model[2].weight.detach().T @ last @ model[2].weight.detach()
    slope = hidden * (1 - hidden)
    first = (slope[:, :, None] * inner * slope[:, None, :]).mean(0)
    for name, factors in {
        "2.weight": (last, hidden.T @ hidden / 6),
        "2.bias": (last,),
        "0.weight": (first, x.T @ x / 6),
        "0.bias": (first,),
    }.items():
        for a, b in zip(found[name].factors, factors, strict=True):
            torch.testing.assert_close(a, b)


def test_kflr_of_a_convolution_with_one_position_is_the_exact_block(generator):
    model = randomised(nn.Sequential(nn.Conv2d(2, 3, (2, 3)), nn.Flatten(), nn.Tanh(), nn.Linear(3, 3)), generator)
    x, y = torch.randn(1, 2, 2, 3, generator=generator, dtype=torch.float64), torch.tensor([1])
    measured = measure(model, lambda: F.cross_entropy(model(x), y), "kflr", engine="backpack")
    assert relative_error(dense(measured), ggn_blocks(model, x, y, F.cross_entropy)) < 1e-10


@pytest.mark.parametrize("keepdim", [False, True])
def test_a_mean_over_all_positions_is_pooling(keepdim, generator):
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, 3, 3), nn.Linear(3, 3)

        def forward(self, x):
            pooled = self.conv(x).tanh().mean((-1, 2), keepdim=keepdim)
            return self.head(pooled.flatten(1) if keepdim else pooled)

    model = randomised(Pooled(), generator)
    x, y = data(generator)
    measured = measure(model, lambda: F.cross_entropy(model(x), y), "diag_ggn", engine="backpack")
    assert relative_error(measured.curvature, ggn_diagonals(model, x, y, F.cross_entropy)) < 1e-10


def test_dropout_is_that_of_the_forward(generator):
    model = randomised(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)), generator)
    x, y = torch.randn(5, 4, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    state = torch.get_rng_state()
    measured = measure(model, lambda: F.cross_entropy(model(x), y), "diag_ggn", engine="backpack")
    torch.set_rng_state(state)
    mask = F.dropout(torch.ones(5, 6, dtype=torch.float64), 0.5)
    kept = nn.Sequential(model[0], model[1], model[3])
    truth = {name: torch.zeros_like(p) for name, p in kept.named_parameters()}
    for i in range(5):
        masked = nn.Sequential(*kept[:2], Masked(mask[i]), kept[2])
        each = ggn_diagonals(masked, x[i : i + 1], y[i : i + 1], F.cross_entropy)
        for name, value in zip(truth, each.values(), strict=True):
            truth[name] += value / 5
    assert relative_error({k.replace("3.", "2."): v for k, v in measured.curvature.items()}, truth) < 1e-10


class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return x * self.mask


def test_resnet18_equals_explicit_jacobians(generator):
    """In evaluation mode, with its in-place activations; its residual sums must be written out of place."""
    model = torchvision.models.resnet18(num_classes=3).double().eval()
    for module in model.modules():
        if isinstance(module, torchvision.models.resnet.BasicBlock):
            module.forward = lambda x, m=module: m.relu(
                m.bn2(m.conv2(m.relu(m.bn1(m.conv1(x))))) + (x if m.downsample is None else m.downsample(x))
            )
    x, y = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64), torch.tensor([0, 2])
    measured = measure(model, lambda: F.cross_entropy(model(x), y), "diag_ggn", engine="backpack")
    assert relative_error(measured.curvature, ggn_diagonals(model, x, y, F.cross_entropy)) < 1e-10


def z_scores(draws, truth):
    """Largest distance of the draws' mean from the truth, in standard errors."""
    error = draws.std(0) / math.sqrt(len(draws))
    scale = float(truth.abs().max())
    return float(((draws.mean(0) - truth).abs() / error.clamp_min(1e-12 * scale)).max())


LIKELIHOODS = {
    "softmax": (Categorical(), F.cross_entropy, lambda y: y),
    "bernoulli": (Bernoulli(), lambda f, t: F.binary_cross_entropy_with_logits(f, t, reduction="sum"), None),
    "poisson": (Poisson(), lambda f, t: F.poisson_nll_loss(f, t, reduction="sum"), None),
    "gaussian": (Gaussian(0.5), lambda f, t: 0.5 * F.mse_loss(f / 0.5, t / 0.5, reduction="sum"), None),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_squares_under_sampled_labels_are_the_fisher_on_average(name, generator):
    likelihood, nll, target = LIKELIHOODS[name]
    model = randomised(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), generator)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 1, 2]) if target else torch.zeros(3, 3, dtype=torch.float64)
    truth = ggn_diagonals(model, x, y, nll)  # the Fisher of these likelihoods
    draws = [measure(model, lambda: likelihood.sampled_loss(model(x), generator)).curvature for _ in range(SAMPLES)]
    for key, fisher in truth.items():
        assert z_scores(torch.stack([d[key] for d in draws]), fisher) < 4.5


def test_monte_carlo_ggn_is_the_ggn_on_average(generator):
    model = randomised(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), generator)
    x, y = torch.randn(3, 4, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2])

    def mc(k):
        loss = lambda: F.cross_entropy(model(x), y)  # noqa: E731
        return measure(model, loss, "diag_ggn_mc", engine="backpack", mc_samples=k).curvature

    truth = ggn_diagonals(model, x, y, F.cross_entropy)
    draws = [mc(2) for _ in range(SAMPLES // 2)]
    for key, ggn in truth.items():
        assert z_scores(torch.stack([d[key] for d in draws]), ggn) < 4.5
    assert relative_error(mc(200_000), truth) < 0.02


def test_samples_follow_the_likelihood(generator):
    logits = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.0]], dtype=torch.float64)
    draws = torch.stack([Categorical().sample(logits, generator) for _ in range(4000)])
    counts = F.one_hot(draws, 3).double()
    assert z_scores(counts, logits.softmax(1)) < 4.5
    assert z_scores(torch.stack([Bernoulli().sample(logits, generator) for _ in range(4000)]), logits.sigmoid()) < 4.5
    noise = torch.stack([Gaussian(0.3).sample(logits, generator) for _ in range(4000)])
    assert z_scores(noise, logits) < 4.5
    assert z_scores((noise - logits).square(), torch.full_like(logits, 0.09)) < 4.5


def test_nll_is_that_of_torch_distributions(generator):
    outputs = torch.randn(4, 3, 2, generator=generator, dtype=torch.float64)
    classes = Categorical().sample(outputs, generator)
    truth = torch.distributions.Categorical(logits=outputs.movedim(1, -1)).log_prob(classes)
    torch.testing.assert_close(Categorical().nll(outputs, classes), -truth.sum(1))
    binary = Bernoulli().sample(outputs, generator)
    truth = torch.distributions.Bernoulli(logits=outputs).log_prob(binary)
    torch.testing.assert_close(Bernoulli().nll(outputs, binary), -truth.sum((1, 2)))
    normal = Gaussian(0.7).sample(outputs, generator)
    truth = torch.distributions.Normal(outputs, 0.7).log_prob(normal)
    torch.testing.assert_close(Gaussian(0.7).nll(outputs, normal), -truth.sum((1, 2)))


def test_sampled_labels_take_the_outputs_in_either_argument_of_the_loss(generator):
    model, x = nn.Sequential(nn.Linear(4, 3)).double(), torch.randn(5, 4, generator=generator, dtype=torch.float64)
    target = torch.zeros(5, 3, dtype=torch.float64)
    first = measure(model, lambda: F.mse_loss(model(x), target), "kfac", seed=0)
    second = measure(model, lambda: F.mse_loss(target, model(x)).clone(), "kfac", seed=0)
    for name, factors in first.curvature.items():
        torch.testing.assert_close(vars(factors), vars(second.curvature[name]), rtol=0, atol=0)


def test_labels_come_from_the_given_generator_alone(generator):
    outputs = torch.randn(5, 3, generator=generator)
    state = torch.get_rng_state()
    for likelihood in (Categorical(), Bernoulli(), Gaussian(1.0)):
        one = likelihood.sample(outputs, torch.Generator().manual_seed(3))
        assert torch.equal(one, likelihood.sample(outputs, torch.Generator().manual_seed(3)))
        assert not torch.equal(one, likelihood.sample(outputs, torch.Generator().manual_seed(4)))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian(1.0)], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_outputs_that_are_not_finite_give_a_loss_that_is_not_finite(likelihood, value):
    outputs = torch.zeros(5, 3)
    outputs[2, 1] = value
    assert not likelihood.sampled_loss(outputs, torch.Generator().manual_seed(0)).isfinite()


def test_bad_likelihoods_are_named():
    for std in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(HyperparameterError, match=rf"std={std} must be a positive, finite standard deviation"):
            Gaussian(std)
    with pytest.raises(ShapeError, match=r"Categorical.* needs .*\[batch, classes, …\].* got \[4, 1\].*link='binary'"):
        Categorical().nll(torch.zeros(4, 1), torch.zeros(4))
    with pytest.raises(ShapeError, match=r"Poisson got log-rates \[4, 1\] and counts \[4\]"):
        Poisson().nll(torch.zeros(4, 1), torch.zeros(4))
    with pytest.raises(ShapeError, match=r"Gaussian got means \[4, 1\] and targets \[4\]"):
        Gaussian(1.0).nll(torch.zeros(4, 1), torch.zeros(4))


def refused(model, closure, error, match, quantity: SecondOrderDiagonal = "diag_ggn"):
    before = [dict(vars(module)) for module in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._backward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    with pytest.raises(error, match=match):
        measure(model, closure, quantity, engine="backpack")
    assert [dict(vars(module)) for module in model.modules()] == before
    assert hooks == [
        (len(m._forward_hooks), len(m._backward_hooks), len(m._forward_pre_hooks)) for m in model.modules()
    ]
    assert not [name for p in model.parameters() for name in vars(p)]


def test_losses_that_backpack_cannot_see_are_refused(generator):
    model, x = nn.Linear(4, 3), torch.randn(5, 4, generator=generator)
    y, loss = torch.tensor([0, 1, 2, -100, 1]), F.cross_entropy
    good = y.clamp_min(0)
    alone = "one supported loss function returns, and would miss its other terms.*Return the result of F.cross_entropy"
    refused(
        model, lambda: model(x).square().mean(), UnsupportedTrainingError, "a loss that one supported loss function"
    )
    refused(model, lambda: 0.5 * loss(model(x), good), UnsupportedTrainingError, alone)
    refused(model, lambda: loss(model(x), good) + model.weight.norm(), UnsupportedTrainingError, alone)
    refused(
        model, lambda: loss(model(x), y), UnsupportedTrainingError, "does not support targets equal to ignore_index"
    )
    refused(
        model, lambda: loss(model(x), good, weight=torch.ones(3)), UnsupportedTrainingError, "cross_entropy with weight"
    )
    refused(
        model,
        lambda: loss(model(x), good, reduction="none").mean(),
        UnsupportedTrainingError,
        "reduction='none'. Use reduction='mean' or 'sum'",
    )
    logged = lambda: (F.mse_loss(model(x), torch.zeros(5, 3)), loss(model(x), good))[1]  # noqa: E731
    refused(model, logged, UnsupportedLayerError, "called twice")
    votes = torch.ones(5, 3)
    refused(model, lambda: loss(model(x), votes), UnsupportedTrainingError, "needs probabilities that sum to 1")
    refused(model, lambda: loss(model(x) / 2, good), UnsupportedLayerError, "CrossEntropyLoss follows DivBackward0")


def test_models_that_backpack_cannot_see_through_are_refused(generator):
    x, y = torch.randn(5, 4, generator=generator), torch.tensor([0, 1, 2, 0, 1])

    def run(model, match, error=UnsupportedLayerError, quantity="diag_ggn", batch=x):
        refused(model, lambda: F.cross_entropy(model(batch), y), error, match, quantity)

    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    run(
        nn.Sequential(a, nn.GELU(), nn.Linear(4, 3)),
        r"2 \(Linear\) follows GeluBackward0, .*diag_ggn does not support",
    )
    run(
        nn.Sequential(a, nn.LayerNorm(4), nn.PReLU()), r"no rule of diag_ggn for 1 \(LayerNorm\), 2 \(PReLU\)\. Replace"
    )
    run(nn.Sequential(a, nn.BatchNorm1d(4)), r"no diag_ggn of BatchNorm in training mode: 1 \(BatchNorm1d\)")
    frozen = nn.BatchNorm1d(4).requires_grad_(False)
    run(nn.Sequential(a, frozen, b), r"2 \(Linear\) follows NativeBatchNormBackward0")
    run(nn.Sequential(a, nn.BatchNorm1d(4).eval()), r"no rule of kflr for 1 \(BatchNorm1d\)", quantity="kflr")
    run(nn.Sequential(a, a), r"0 \(Linear\) is called twice in one pass.*Use a separate layer for each call")
    b.weight = a.weight
    run(nn.Sequential(a, b), r"overwrite the curvature of tied parameters: 0\.weight = 1\.weight")
    run(Halves(), r"0 \(Linear\) follows SliceBackward0|head \(Linear\) follows SliceBackward0")
    run(InPlace(), "changed in place", UnsupportedTrainingError)
    conv = nn.Conv1d(2, 3, 2, padding_mode="circular", padding=1)
    run(nn.Sequential(conv, nn.Flatten()), r"no rule of diag_ggn for 0 \(Conv1d\)", batch=x.view(5, 2, 2))
    transposed = nn.Sequential(nn.ConvTranspose1d(2, 3, 2), nn.Flatten())
    run(transposed, r"no rule of kfra for 0 \(ConvTranspose1d\)", batch=x.view(5, 2, 2), quantity="kfra")
    same = nn.Conv1d(2, 3, 3, padding="same")
    run(nn.Sequential(same, nn.Flatten()), r"no rule of diag_ggn for 0 \(Conv1d\)", batch=x.view(5, 2, 2))
    frozen = nn.Conv1d(3, 3, 1, padding_mode="circular", padding=1).requires_grad_(False)
    stack = nn.Sequential(nn.Conv1d(2, 3, 2), frozen, nn.Flatten())
    run(stack, "Flatten follows ConvolutionBackward0", batch=x.view(5, 2, 2))
    average = nn.Sequential(nn.Conv2d(1, 3, 1), nn.AvgPool2d(2, divisor_override=3), nn.Flatten())
    run(average, "Flatten follows AvgPool2DBackward0", batch=x.view(5, 1, 2, 2))
    average[1] = nn.AvgPool2d(2, padding=1, count_include_pad=False)
    run(average, "BackPACK cannot measure diag_ggn of this model: Might not work", batch=x.view(5, 1, 2, 2))
    run(Branch(), "BackPACK cannot measure diag_hessian of this model", quantity="diag_hessian")
    run(nn.Linear(4, 3), "got an input of shape", ExampleDimensionError, batch=x[0])


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(2, 3)

    def forward(self, x):
        return self.head(self.body(x)[:, :2])


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        out = self.body(x)
        out += x
        return self.head(out)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x) + x)


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # torch says that CPU autocast has no float32 op list entry
def test_autocast_is_refused(generator):
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4, generator=generator), torch.tensor([0, 1, 2, 0, 1])

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x), y)

    refused(model, loss, UnsupportedTrainingError, "BackPACK cannot run under autocast. Train in 32-true")


def test_model_and_gradients_are_left_as_they_were(generator):
    model = randomised(Functional(), generator)
    x, y = data(generator)
    kept = torch.ones_like(model.head.weight)
    model.head.weight.grad = kept
    before, handles = [dict(vars(module)) for module in model.modules()], len(CTX.hook_handles)
    measure(model, lambda: F.cross_entropy(model(x), y), "diag_ggn", engine="backpack")
    assert [dict(vars(module)) for module in model.modules()] == before
    assert len(CTX.hook_handles) == handles
    assert model.head.weight.grad is kept
    assert not [name for p in model.parameters() for name in vars(p)]


def test_losses_that_are_only_logged_do_not_matter(generator):
    model = randomised(nn.Sequential(nn.Linear(4, 3)), generator)
    x, y = torch.randn(5, 4, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    logged = []

    def loss():
        outputs = model(x)
        logged.append(F.mse_loss(outputs, torch.zeros_like(outputs)))
        return F.cross_entropy(outputs, y)

    measured = measure(model, loss, "diag_ggn", engine="backpack")
    assert relative_error(measured.curvature, ggn_diagonals(model, x, y, F.cross_entropy)) < 1e-10


def test_frozen_layers_let_curvature_through(generator):
    model = randomised(Smooth(), generator)
    x, y = data(generator)
    whole = measure(model, lambda: F.cross_entropy(model(x), y), "diag_ggn", engine="backpack")
    model.mid.requires_grad_(False)
    part = measure(model, lambda: F.cross_entropy(model(x), y), "diag_ggn", engine="backpack")
    assert part.curvature.keys() == {k for k in whole.curvature if not k.startswith("mid")}
    assert relative_error(part.curvature, {k: whole.curvature[k] for k in part.curvature}) < 1e-12
