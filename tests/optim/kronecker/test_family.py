"""K-FAC and Noisy K-FAC as optimizers: measurements, intervals, posterior, steps and errors."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import through_a_file, train_on
from oracles import mean_squares
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_bayes.errors import (
    HyperparameterError,
    NoMeasurementError,
    NotPositiveDefiniteError,
    PosteriorError,
    UnsupportedLayerError,
)
from lightning_bayes.likelihood import Categorical, OutputLikelihood
from lightning_bayes.linalg import KroneckerProduct, pi_damped
from lightning_bayes.optim import KFAC, NoisyKFAC
from lightning_bayes.optim.kronecker.layer import KroneckerLayer
from lightning_bayes.posteriors import MatrixGaussian

F64 = torch.float64
N = 40


def small_net(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 3))
    return net.double()


def images(generator, n=12):
    return torch.randn(n, 2, 4, 4, generator=generator, dtype=F64), torch.randint(0, 3, (n,), generator=generator)


def train(model, opt, data, steps, loss=F.cross_entropy):
    x, y = data
    train_on(opt, lambda: loss(model(x), y), steps)


def factors(opt, weight):
    state = opt.state[weight]
    return KroneckerProduct(state["output_factor"], state["input_factor"])


def matrix_gradient(layer, loss):
    grads = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
    return torch.cat([g.flatten(1) if g.dim() > 1 else g[:, None] for g in grads], 1)


# -- what is measured --


def test_labels_drawn_from_softmax_give_the_fisher_not_the_empirical_one(generator):
    """At zero weights p = 1/3, so S = diag(p) - p pᵀ for any labels of the data."""
    model, n = nn.Linear(2, 3).double(), 6000
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    x, y = torch.randn(n, 2, generator=generator, dtype=F64), torch.zeros(n, dtype=torch.long)
    exact = torch.eye(3, dtype=F64) / 3 - 1 / 9
    for fisher, is_fisher in (("sampled", True), ("empirical", False)):
        model.lightning_bayes_likelihood = Categorical()
        opt = KFAC(copy.deepcopy(model), num_data=N, fisher=fisher)
        with opt.sampled_params():
            F.cross_entropy(opt.model(x), y).backward()
        opt.step()
        distance = (factors(opt, opt.model.weight).left - exact).abs().max()
        assert (distance < 4 * 0.5 / math.sqrt(n)) == is_fisher  # an entry lies between 0 and 1


def test_drawn_labels_leave_gradients_statistics_and_random_numbers_alone(generator):
    model, (x, y) = small_net(), images(generator)
    plain = copy.deepcopy(model)
    F.cross_entropy(plain(x), y).backward()
    opt = NoisyKFAC(model, num_data=N, likelihood=Categorical())
    state = torch.get_rng_state()
    with opt.sampled_params():
        F.cross_entropy(model(x), y).backward()
    assert torch.equal(torch.get_rng_state(), state)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b)


def test_drawn_labels_measure_the_other_layers_too(generator):
    """The squares of a BatchNorm with sampled labels equal those of `measure` with the same samples."""
    model, (x, _) = small_net(), images(generator)
    empirical = KFAC(copy.deepcopy(model), num_data=N, fisher="empirical")
    drawn = {}

    class Recording(OutputLikelihood):
        def sample(self, outputs, generator):
            drawn["y"] = Categorical().sample(outputs, generator)
            return drawn["y"]

        def log_prob(self, outputs, targets):
            return -F.cross_entropy(outputs, targets, reduction="none")

    sampled = KFAC(copy.deepcopy(model), num_data=N, likelihood=Recording())
    train_on(sampled, lambda: F.cross_entropy(sampled.model(x), torch.zeros(len(x), dtype=torch.long)))
    train_on(empirical, lambda: F.cross_entropy(empirical.model(x), drawn["y"]))
    for mine, theirs in zip(sampled.model.parameters(), empirical.model.parameters(), strict=True):
        for key in ("curvature", "output_factor", "input_factor"):
            assert (key in sampled.state[mine]) == (key in empirical.state[theirs])
            if key in sampled.state[mine]:
                torch.testing.assert_close(sampled.state[mine][key], empirical.state[theirs][key])


class Recomputed(nn.Module):
    def __init__(self, use_reentrant=None):
        super().__init__()
        self.first, self.norm, self.last, self.use_reentrant = (
            nn.Linear(3, 4),
            nn.LayerNorm(4),
            nn.Linear(4, 3),
            use_reentrant,
        )

    def hidden(self, x):
        return self.norm(self.first(x)).tanh()

    def forward(self, x):
        if self.use_reentrant is None:
            return self.last(self.hidden(x))
        return self.last(checkpoint(self.hidden, x.requires_grad_(), use_reentrant=self.use_reentrant))


def measured_state(likelihood, use_reentrant, generator):
    torch.manual_seed(0)
    model = Recomputed(use_reentrant).double()
    opt = KFAC(model, num_data=N, likelihood=likelihood)
    x = torch.randn(6, 3, generator=generator, dtype=F64)
    train(model, opt, (x, torch.zeros(6, dtype=torch.long)), 1)
    return {f"{i}/{k}": v for i, p in enumerate(model.parameters()) for k, v in opt.state[p].items()}


@pytest.mark.parametrize(("likelihood", "use_reentrant"), [(None, False), (None, True), (Categorical(), False)])
def test_activation_checkpoints_change_nothing(likelihood, use_reentrant):
    found = measured_state(likelihood, use_reentrant, torch.Generator().manual_seed(1))
    expected = measured_state(likelihood, None, torch.Generator().manual_seed(1))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda m, name=name: f"{name}: {m}")


def test_labels_cannot_be_drawn_behind_a_reentrant_checkpoint(generator):
    with pytest.raises(UnsupportedLayerError, match=r"measure first\.weight.*pass use_reentrant=False instead"):
        measured_state(Categorical(), True, generator)


def test_a_layer_that_is_called_twice_has_its_calls_for_positions(generator):
    shared, x = nn.Linear(3, 3).double(), torch.randn(5, 3, generator=generator, dtype=F64)
    opt = KFAC(shared, num_data=N)
    with opt.sampled_params():
        hidden = shared(x)
        output = shared(hidden)
        hidden.retain_grad(), output.retain_grad()
        output.square().sum(1).mean().backward()
    inputs = torch.cat([torch.cat([h.detach(), torch.ones(5, 1, dtype=F64)], 1) for h in (x, hidden)])
    deltas = 5 * torch.cat([hidden.grad, output.grad])
    opt.step()
    found = factors(opt, shared.weight)
    torch.testing.assert_close(found.right, inputs.T @ inputs / 5)
    torch.testing.assert_close(found.left, deltas.T @ deltas / 10)


def test_a_grad_scaler_leaves_the_factors_unscaled(generator):
    data = images(generator)
    for likelihood in (None, Categorical()):
        opts = [NoisyKFAC(small_net(), num_data=N, likelihood=likelihood) for _ in range(2)]
        for opt, scale in zip(opts, (1.0, 1024.0), strict=True):
            with opt.sampled_params(loss_scale=scale):
                (F.cross_entropy(opt.model(data[0]), data[1]) * scale).backward()
            for p in opt.model.parameters():
                p.grad /= scale
            opt.step()
        for p, q in zip(*(opt.model.parameters() for opt in opts), strict=True):
            torch.testing.assert_close(p, q)


# -- when --


def test_factors_are_measured_and_inverted_when_they_are_due(generator):
    model, data = small_net(), images(generator)
    opt = NoisyKFAC(model, num_data=N, lr=1e-3, stats_interval=3, inverse_interval=50)
    measured, inverted = [], []
    state = opt.state[model[4].weight]
    for step in range(1, 15):
        before = {key: state.get(key) for key in ("output_factor", "output_root")}
        train(model, opt, data, 1)
        measured += [step] if state["output_factor"] is not before["output_factor"] else []
        inverted += [step] if state["output_root"] is not before["output_root"] else []
    assert measured == [1, 4, 7, 10, 13]
    assert inverted == [1, 4, 10]  # at measurements 1, 2 and 4; regularly due at update 26


def test_layers_take_turns(generator):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]).double()
    x = torch.randn(6, 3, generator=generator, dtype=F64)
    opt = KFAC(model, num_data=N, lr=1e-3, stats_interval=20, inverse_interval=20)
    turns = {}
    for step in range(1, 41):
        before = [opt.state[layer.weight].get("output_inverse") for layer in model]
        train(model, opt, (x, x), 1, F.mse_loss)
        for i, layer in enumerate(model):
            if opt.state[layer.weight]["output_inverse"] is not before[i] and step not in {1, 21}:
                turns.setdefault(i, []).append(step)
    assert turns == {1: [6, 26], 2: [11, 31], 3: [16, 36]}  # the first layer is due together with the measurement


def test_a_pass_that_is_not_due_is_plain_training(generator):
    model, (x, y) = small_net(), images(generator)
    opt = KFAC(model, num_data=N, lr=1e-3)
    train(model, opt, (x, y), 1)
    plain = copy.deepcopy(model)
    F.cross_entropy(plain(x), y).backward()
    with opt.sampled_params():
        assert not any("forward" in vars(module) for module in model.modules())
        F.cross_entropy(model(x), y).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("optimizer", [KFAC, NoisyKFAC])
@pytest.mark.parametrize("steps", [4, 5, 8])
def test_resume_between_two_inversions_is_bit_equal(optimizer, steps, generator):
    data = images(generator)

    def build():
        model = small_net()
        arguments = {
            "lr": 1e-2,
            "damping": 1e-2,
            "stats_interval": 3,
            "inverse_interval": 7,
            "likelihood": Categorical(),
        }
        return model, optimizer(model, num_data=N, **arguments)

    model, opt = build()
    train(model, opt, data, steps)
    saved = through_a_file({"model": model.state_dict(), "optimizer": opt.state_dict()})
    train(model, opt, data, 9)
    other, resumed = build()
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, data, 9)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    for mine, theirs in zip(opt.state.values(), resumed.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k])) for k in mine)


# -- the posterior --


def test_samples_have_the_posterior_s_covariance(generator):
    """Right after an inversion, weight and bias jointly; in standard errors of 4000 draws."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2).double()
    x, y = torch.randn(9, 2, generator=generator, dtype=F64), torch.randn(9, 2, generator=generator, dtype=F64)
    opt = NoisyKFAC(model, num_data=N, damping=0.1, damping_in_noise=True, kl_weight=0.5)
    train(model, opt, (x, y), 1, F.mse_loss)
    posterior = opt.posterior()
    assert isinstance(posterior, MatrixGaussian)
    left, right = posterior.factors["weight"]
    covariance = torch.linalg.inv(torch.kron(left, right))
    mean, draws, n = torch.cat([model.weight, model.bias[:, None]], 1).detach().flatten(), [], 4000
    with torch.no_grad():
        for sample in range(n):
            with opt.sampled_params(sample):
                draws.append(torch.cat([model.weight, model.bias[:, None]], 1).flatten())
    away = torch.stack(draws) - mean
    size = covariance.diagonal()
    error = ((size[:, None] * size[None] + covariance.square()) / n).sqrt()
    assert ((away.T @ away / n - covariance) / error).abs().max() < 4.5
    assert (away.mean(0) * (n / size).sqrt()).abs().max() < 4


def test_relative_noise_is_the_root_mean_square_of_a_layers_noise(generator):
    """The Kronecker factors shape the noise: the precision is a multiple of π-damped factors."""
    model, data = small_net(), images(generator)
    opt = NoisyKFAC(model, num_data=N, lr=1e-4, relative_noise=0.01, stats_interval=1, inverse_interval=1)
    train(model, opt, data, 2)
    q = opt.posterior()
    for name, biased in q.biases.items():
        weight, state = model.get_parameter(name), opt.state[model.get_parameter(name)]
        size = max(weight.square().mean().sqrt(), state["initial_rms"])
        variance = torch.cat([q.variance()[part].flatten() for part in (name, biased)])
        assert variance.mean().sqrt() == pytest.approx(0.01 * size.item(), rel=1e-2)
        product = KroneckerProduct(state["output_factor"], state["input_factor"])
        damping = 0.03 * product.diagonal().mean() + 1 / N
        expected = pi_damped(product, damping).dense()
        found = KroneckerProduct(*q.factors[name]).dense()
        torch.testing.assert_close(found / found.mean(), expected / expected.mean())
        assert q.prior_precision[name] == pytest.approx(float(damping * found.trace() / expected.trace()), rel=1e-6)
    assert 0 < opt.effective_parameters() < sum(param.numel() for param in model.parameters())


def test_a_layer_without_curvature_has_flat_noise(generator):
    model = nn.Linear(3, 2).double()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = NoisyKFAC(model, base=base, num_data=N, relative_noise=0.1, stats_interval=1, prior_on_mean=False)
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    train_on(opt, lambda: F.mse_loss(0 * model(x), torch.zeros(8, 2, dtype=torch.float64)))
    size = opt.state[model.weight]["initial_rms"]
    for variance in opt.posterior().variance().values():
        torch.testing.assert_close(variance, torch.full_like(variance, float(0.1 * size) ** 2), rtol=0.05, atol=0)


def test_initial_precision_is_the_first_posterior():
    model = nn.Conv2d(4, 4, 2, groups=2).double()
    opt = NoisyKFAC(model, num_data=N, init_precision=400.0, kl_weight=0.5, damping=1e-3, damping_in_noise=True)
    for variance in opt.posterior().variance().values():
        torch.testing.assert_close(variance, torch.full_like(variance, 1 / 400))


def test_a_prior_at_the_initial_weights_pulls_there(generator):
    """Without a gradient the natural step is that of the prior alone, to its mean."""
    model = nn.Linear(3, 2).double()
    start = model.weight.detach().clone()
    opt = NoisyKFAC(model, lr=0.5, num_data=N, prior_mean="initial", betas=(0.0, 0.9), stats_interval=1)
    x = torch.zeros(4, 3, dtype=F64)
    with torch.no_grad():
        model.weight += 1
        model.bias += 1
    train(model, opt, (x, None), 1, lambda output, _: 0 * output.sum(1).mean())
    torch.testing.assert_close(model.weight, start + 0.5, rtol=1e-4, atol=1e-4)
    assert opt.posterior().prior_mean["weight"].equal(start)


def test_parameters_outside_of_the_posterior_are_points(generator):
    model, data = small_net(), images(generator)
    opt = NoisyKFAC(model, num_data=N, lr=1e-2, bayesian="^4")
    train(model, opt, data, 2)
    assert sorted(opt.posterior().mean) == ["4.bias", "4.weight"]
    with torch.no_grad(), opt.sampled_params():
        assert model[0].weight.equal(opt.posterior().constants["0.weight"])


# -- which layers --


def test_the_rest_is_mean_field_and_said_in_the_summary(generator):
    model, data = small_net(), images(generator)
    opt = NoisyKFAC(model, num_data=N, max_side=18)  # the convolution has 2·9 inputs and a bias
    train(model, opt, data, 2)
    posterior = opt.posterior()
    assert posterior.factors.keys() == {"4.weight"}
    assert posterior.precision.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    summary = "NoisyKFAC: Kronecker factors for 1 layers, labels from the data (empirical Fisher)"
    assert opt.family.describe().startswith(summary)
    assert opt.family.describe().endswith("mean-field: 0 (side 19 > max_side=18), 1.")
    drawn = NoisyKFAC(small_net(), num_data=N, likelihood=Categorical())
    assert "labels drawn from Categorical (Fisher)" in drawn.family.describe()


class Positions(nn.Module):
    """Adds positions that all examples share, as language models do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer, self.head = nn.Embedding(3, 4), nn.Linear(2, 4), nn.Linear(12, 3)

    def forward(self, x):
        return self.head((self.layer(x) + self.table(torch.arange(3))).tanh().flatten(1))


@pytest.mark.filterwarnings("ignore:.*one backward pass for each of the:UserWarning")
def test_what_all_examples_share_is_mean_field(generator):
    model = Positions().double()
    x, y = torch.randn(6, 3, 2, generator=generator, dtype=F64), torch.arange(6) % 3
    expected = mean_squares(model, [F.cross_entropy(model(x[[i]]), y[[i]]) for i in range(6)])["table.weight"]
    opt = NoisyKFAC(model, num_data=N, lr=1e-2)
    train(model, opt, (x, y), 1)
    torch.testing.assert_close(opt.state[model.table.weight]["curvature"], expected)
    assert opt.posterior().factors.keys() == {"layer.weight", "head.weight"}
    with pytest.raises(
        UnsupportedLayerError, match=r"measure table\.weight: all examples share them.*fisher='empirical'"
    ):
        train(model, NoisyKFAC(model, num_data=N, likelihood=Categorical()), (x, y), 1)


def test_tied_weights_are_mean_field(generator):
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "out": nn.Linear(3, 5)})
    model["out"].weight = model["embed"].weight
    opt = NoisyKFAC(model, num_data=N, lr=1e-2)
    tokens = torch.randint(0, 5, (6, 2), generator=generator)
    train_on(opt, lambda: F.cross_entropy(model["out"](model["embed"](tokens)).mean(1), tokens[:, 0]), 2)
    assert not getattr(opt.posterior(), "factors", {})


def test_a_bias_that_is_frozen_later_leaves_the_matrix(generator):
    model, data = small_net(), images(generator)
    opt = NoisyKFAC(model, num_data=N, lr=1e-2)
    train(model, opt, data, 2)
    bias = model[4].bias.detach().clone()
    model[4].bias.requires_grad_(False)
    train(model, opt, data, 2)
    assert torch.equal(model[4].bias, bias)
    posterior = opt.posterior()
    assert posterior.factors["4.weight"][1].shape == (16, 16)
    assert "4.bias" in posterior.constants
    model[4].bias.requires_grad_(True)
    train(model, opt, data, 2)
    assert opt.posterior().factors["4.weight"][1].shape == (17, 17)
    assert not torch.equal(model[4].bias, bias)


def test_a_layer_whose_bias_is_frozen_is_measured_at_the_next_update(generator):
    """It does not start with zero factors, although no measurement is due."""
    model, data = small_net(), images(generator)
    opt = NoisyKFAC(model, num_data=N, lr=1e-2, stats_interval=50, inverse_interval=50)
    train(model, opt, data, 2)
    model[4].bias.requires_grad_(False)
    train(model, opt, data, 1)
    assert factors(opt, model[4].weight).right.shape == (16, 16)
    assert all((factor.diagonal() > 0).any() for factor in factors(opt, model[4].weight))


def test_weight_and_bias_may_have_groups_of_their_own(generator):
    """One matrix, two learning rates: half the rate is half the step."""
    x, y = torch.randn(6, 3, generator=generator, dtype=F64), torch.randn(6, 2, generator=generator, dtype=F64)
    moved = []
    for rate in (0.1, 0.05):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        before = [p.detach().clone() for p in model.parameters()]
        groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": rate}]
        opt = KFAC(model, groups, num_data=N, damping=0.1)
        train(model, opt, (x, y), 1, F.mse_loss)
        assert opt.state[model.weight]["input_factor"].shape == (4, 4)
        moved.append([p.detach() - b for p, b in zip(model.parameters(), before, strict=True)])
    torch.testing.assert_close(moved[0][0], moved[1][0])
    torch.testing.assert_close(moved[0][1], 2 * moved[1][1])


# -- the step --


def test_the_step_is_k_fac_s(generator):
    """W - α (S + √γ'/π I)⁻¹ (ĝ + δ̃ W) (A + π√γ' I)⁻¹ by dense linear algebra."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(9, 3, generator=generator, dtype=F64), torch.randn(9, 2, generator=generator, dtype=F64)
    before = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    grad = matrix_gradient(model, F.mse_loss(model(x), y))
    opt = KFAC(model, lr=0.3, num_data=N, prior_precision=2.0, damping=0.1, betas=(0.9, 0.9))
    train(model, opt, (x, y), 1, F.mse_loss)
    left, right = factors(opt, model.weight)
    pi = math.sqrt((right.trace() / 4) / (left.trace() / 2))
    root = math.sqrt(2 / N + 0.1)
    dense = torch.kron(left + root / pi * torch.eye(2), right + pi * root * torch.eye(4))
    expected = before.flatten() - 0.3 * torch.linalg.solve(dense, (grad + 2 / N * before).flatten())
    torch.testing.assert_close(torch.cat([model.weight, model.bias[:, None]], 1).flatten(), expected)


def fisher_norm_of_the_step(opt, start):
    """dᵀ F d with F the damped curvature of the step, layer by layer."""
    moved = {name: param.detach() - start[name] for name, param in opt.model.named_parameters()}
    norm = 0.0
    for name in ("0", "4"):
        state = opt.state[opt.model.get_parameter(f"{name}.weight")]
        step = torch.cat([moved[f"{name}.weight"].flatten(1), moved[f"{name}.bias"][:, None]], 1).flatten()
        inverse = KroneckerProduct(state["output_inverse"], state["input_inverse"]).dense()
        norm += step @ torch.linalg.solve(inverse, step)
    for name in ("1.weight", "1.bias"):
        curvature = opt.state[opt.model.get_parameter(name)]["curvature"]
        norm += (moved[name].square() * (curvature + 1 / N + 0.1)).sum()
    return norm.item()


def test_the_kl_clip_bounds_the_fisher_norm_of_the_whole_step(generator):
    data = images(generator)
    free, clipped, loose = (KFAC(small_net(), lr=0.1, num_data=N, damping=0.1, kl_clip=c) for c in (None, 1e-5, 1e9))
    start = {name: param.detach().clone() for name, param in free.model.named_parameters()}
    for opt in (free, clipped, loose):
        train(opt.model, opt, data, 1)
    assert fisher_norm_of_the_step(clipped, start) == pytest.approx(1e-5, rel=1e-6)
    assert fisher_norm_of_the_step(free, start) > 1e-4
    assert all(map(torch.equal, free.model.parameters(), loose.model.parameters()))


# -- errors --


def test_a_likelihood_that_cannot_be_sampled_is_refused():
    model = small_net()
    model.lightning_bayes_likelihood = "softmax"
    with pytest.raises(HyperparameterError, match=r"can be sampled, but Sequential has 'softmax'"):
        NoisyKFAC(model, fisher="sampled")
    NoisyKFAC(model)  # labels of the data
    with pytest.raises(HyperparameterError, match=r"fisher='exact' is unknown"):
        NoisyKFAC(model, fisher="exact")


def test_outputs_that_nobody_saw_are_explained(generator):
    model, (x, y) = small_net(), images(generator)
    opt = NoisyKFAC(model, num_data=N, likelihood=Categorical())
    with (
        pytest.raises(
            NoMeasurementError, match=r"does not depend on an output of Sequential's forward.*fisher='empirical'"
        ),
        opt.sampled_params(),
    ):
        F.cross_entropy(model[4](model[:4](x)), y).backward()


def test_parameters_beside_the_outputs_are_named(generator):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.side = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x):
            self.extra = self.side(self.body(x))
            return self.head(self.body(x))

    model, x = TwoHeads(), torch.randn(6, 3, generator=generator)
    opt = NoisyKFAC(model, num_data=N, likelihood=Categorical())
    labels = torch.zeros(6, dtype=torch.long)
    with (
        pytest.raises(
            UnsupportedLayerError, match=r"measure side\.weight, side\.bias: .*the outputs of TwoHeads do not depend"
        ),
        opt.sampled_params(),
    ):
        (F.cross_entropy(model(x), labels) + F.cross_entropy(model.extra, labels)).backward()


def test_factors_that_do_not_fit_into_memory_are_refused():
    layer = nn.Linear(1000, 1008)
    expected = r"factors, inverses, roots of 1 layers.*would take 23\.1 MiB, more than limit_mib=20.*max_side"
    with pytest.raises(PosteriorError, match=expected):
        NoisyKFAC(layer, limit_mib=20)
    NoisyKFAC(layer, base=torch.optim.SGD(layer.parameters()), limit_mib=20)  # SGD's step needs no inverse


def test_an_overflow_in_the_factors_skips_the_update(generator):
    model, (x, y) = nn.Sequential(nn.Linear(3, 2)), (torch.full((4, 3), 1e30), torch.zeros(4, 2))
    opt = KFAC(model, num_data=N)
    before = model[0].weight.detach().clone()
    with opt.sampled_params():
        (model(x) * 1e-30).sub(y).square().mean().backward()
    with pytest.warns(UserWarning, match="non-finite gradient or curvature"):
        opt.step()
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("optimizer", [KFAC, NoisyKFAC])
def test_an_inversion_that_fails_leaves_everything_as_it_was(optimizer, generator, monkeypatch):
    """The first layer has already been inverted when the second one fails."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    opt = optimizer(model, num_data=N, damping=1e-2, stats_interval=1, inverse_interval=1)
    data = torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)
    train(model, opt, data, 1)
    before = [(p.detach().clone(), copy.deepcopy(opt.state[p])) for p in model.parameters()]
    inverted = KroneckerLayer.inverted

    def failing(self, factors):
        if self.matrix.name == "2":
            raise NotPositiveDefiniteError("no Cholesky factor")
        return inverted(self, factors)

    with monkeypatch.context() as patched:
        patched.setattr(KroneckerLayer, "inverted", failing)
        with pytest.raises(NotPositiveDefiniteError):
            train(model, opt, data, 1)
    assert opt.num_updates == 1
    for param, (value, state) in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, value)
        assert state.keys() == opt.state[param].keys()
        torch.testing.assert_close(opt.state[param], state, rtol=0, atol=0)
    opt.zero_grad()
    train(model, opt, data, 1)
    assert opt.num_updates == 2
