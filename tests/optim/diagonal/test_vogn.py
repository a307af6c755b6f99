"""VOGN against closed forms, a hand-written recurrence and the laws of its noise."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from optimizer_family import half_squares, train_on
from torch import nn

from lightning_bayes.errors import HyperparameterError, UnsupportedTrainingError
from lightning_bayes.optim import OGN, VOGN
from lightning_bayes.optim.diagonal.state import MeanFieldState
from lightning_bayes.optim.diagonal.vogn import update
from lightning_bayes.optim.noise import CounterNoise

F64 = torch.float64


def regression(generator, n=40, d=3):
    x = torch.randn(n, d, generator=generator, dtype=F64)
    y = x @ torch.randn(d, 1, generator=generator, dtype=F64) + 0.3 * torch.randn(n, 1, generator=generator, dtype=F64)
    return x, y


def linear(d=3):
    return nn.Linear(d, 1, bias=False).double()


@pytest.mark.parametrize("damping", [0.0, 0.7])
def test_pure_update_is_the_paper_line_by_line(damping):
    """Khan et al. 2018 eqs. 10-11 with numbers by hand: β = 0.5, λ̃ = 0.1, α = 0.2; damping adds to the preconditioner."""
    start = MeanFieldState(torch.tensor([2.0], dtype=F64), torch.tensor([1.0], dtype=F64), torch.zeros(1, dtype=F64))
    grad, sq_grad = torch.tensor([0.6], dtype=F64), torch.tensor([3.0], dtype=F64)
    new = update(start, grad, sq_grad, lr=0.2, betas=(0.0, 0.5), prior=0.1, damping=damping)
    assert new.curvature.item() == pytest.approx(0.5 * 1 + 0.5 * 3)
    assert new.mean.item() == pytest.approx(2 - 0.2 * (0.6 + 0.1 * 2) / (2 + 0.1 + damping))


@pytest.mark.parametrize("kl_weight", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("augmentation", [1.0, 4.0])
def test_posterior_precision_is_exact_for_every_kl_weight(kl_weight, augmentation, generator):
    """Fixed point of E_q[Ñ f] + τ KL: 1/Σ = (Ñ/τ) h + δ, with δ itself and not τδ (algorithms E6)."""
    x, y = regression(generator)
    model, delta = linear(), 2.0
    opt = VOGN(
        model,
        lr=1e-12,
        betas=(0.9, 0.0),
        num_data=len(x),
        prior_precision=delta,
        kl_weight=kl_weight,
        data_augmentation_factor=augmentation,
    )
    train_on(opt, lambda: half_squares(model, x, y), 2)
    h = opt.state[model.weight]["curvature"]
    expected = augmentation * len(x) / kl_weight * h + delta
    torch.testing.assert_close(opt.posterior().precision["weight"], expected)
    printed_form = augmentation * len(x) / kl_weight * h + kl_weight * delta
    if kl_weight != 1:
        assert not torch.allclose(opt.posterior().precision["weight"], printed_form)


def test_ogn_without_noise_and_prior_is_the_hand_written_recurrence(generator):
    """100 steps of a recurrence written out with per-example gradients in closed form."""
    x, y = regression(generator)
    model = linear()
    opt = OGN(model, lr=0.05, betas=(0.9, 0.99), num_data=len(x), prior_precision=1e-300)
    w, m, s = model.weight.detach().clone()[0], torch.zeros(3, dtype=F64), None
    for t in range(1, 101):
        rows = torch.randint(0, len(x), (8,), generator=generator)
        with opt.sampled_params():
            half_squares(model, x[rows], y[rows]).backward()
        opt.step()
        each = x[rows] * (x[rows] @ w[:, None] - y[rows])
        s = each.square().mean(0) if s is None else s
        s = 0.99 * s + 0.01 * each.square().mean(0)
        m = 0.9 * m + 0.1 * each.mean(0)
        w = w - 0.05 * (m / (1 - 0.9**t)) / s
        torch.testing.assert_close(model.weight.detach()[0], w, rtol=1e-10, atol=1e-12)


def test_fixed_point_is_the_empirical_fisher_not_the_exact_precision(generator):
    """VOGN's precision solves P = δ + Σ_i E_q[g_i²]; the exact mean-field precision is δ + Σ_i x_i² (algorithms E3)."""
    x, y = regression(generator)
    model, delta = linear(), 1.0
    opt = VOGN(model, lr=0.02, betas=(0.9, 0.995), num_data=len(x), prior_precision=delta, init_precision=50.0)
    late = []
    for t in range(1500):
        train_on(opt, lambda: half_squares(model, x, y))
        if t > 500 and t % 20 == 0:
            late.append(opt.posterior().precision["weight"][0])
    found = torch.stack(late).mean(0)
    # E_q[g_i²] = x_i² E_q[r_i²] with r_i ~ N(x_iᵀμ - y_i, Σ_d x_id²/P_d): iterate to the fixed point.
    mean = torch.linalg.solve(x.T @ x + delta * torch.eye(3, dtype=F64), x.T @ y)
    precision = torch.full((3,), 50.0, dtype=F64)
    for _ in range(500):
        second_moment = (x @ mean - y).square() + (x.square() / precision).sum(1, keepdim=True)
        precision = delta + (x.square() * second_moment).sum(0)
    torch.testing.assert_close(found, precision, rtol=0.1, atol=0)
    exact = delta + x.square().sum(0)
    assert (found / exact - 1).abs().min() > 0.3


def test_initial_precision_is_the_first_posterior(generator):
    model = linear()
    opt = VOGN(model, num_data=40, init_precision=400.0, kl_weight=0.5, damping=1e-3, damping_in_noise=True)
    torch.testing.assert_close(opt.posterior().precision["weight"], torch.full((1, 3), 400.0, dtype=F64))


def two_batches(generator):
    x, y = regression(generator, n=16)
    return [(x[:8], y[:8]), (x[8:], y[8:])], (x, y)


def start(generator, **arguments):
    model = linear()
    nn.init.ones_(model.weight)
    return model, VOGN(model, lr=0.1, num_data=16, init_precision=9.0, **arguments)


def test_clipping_between_pass_and_step_acts(generator):
    _, (x, y) = two_batches(generator)
    model, opt = start(generator, betas=(0.0, 0.999), prior_precision=1e-9)
    with opt.sampled_params(0):
        half_squares(model, x, y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm > 1e-3
    opt.step()
    step = (model.weight - 1) * (opt.state[model.weight]["curvature"] + 1e-9 / 16) / -0.1
    assert step.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_frozen_unused_and_grouped_parameters(generator):
    """Frozen parameters have no noise and no step; unused ones are pulled to the prior, where the authors' IVON crashes."""
    model = nn.ModuleDict({"used": linear(), "unused": linear(), "frozen": linear()})
    model["frozen"].requires_grad_(False)
    frozen, unused = model["frozen"].weight.clone(), model["unused"].weight.detach().clone()
    groups = [{"params": model["used"].parameters(), "lr": 0.1}, {"params": model["unused"].parameters(), "lr": 0.01}]
    opt = VOGN(model, groups, num_data=40, betas=(0.0, 0.999))
    x, y = regression(generator)
    train_on(opt, lambda: half_squares(model["used"], x, y), 3)
    assert torch.equal(model["frozen"].weight, frozen)
    torch.testing.assert_close(model["unused"].weight, unused * 0.99**3)  # s = 0: the natural step of the prior alone
    assert "frozen.weight" in opt.posterior().constants


def test_decoupled_weight_decay_is_adamw_s(generator):
    x, y = regression(generator)
    model, opt = start(generator, weight_decay=0.5)
    plain_model, plain = start(generator)
    for m, o in ((model, opt), (plain_model, plain)):
        with o.sampled_params(0):
            half_squares(m, x, y).backward()
        o.step()
    prior = 1.0 / 16 / (opt.state[model.weight]["curvature"] + 1.0 / 16)  # the prior's gradient uses the decayed mean
    torch.testing.assert_close(model.weight, plain_model.weight - 0.05 + 0.1 * 0.05 * prior)


@pytest.mark.parametrize("features", [3, 300], ids=["small tensor", "large tensor"])
def test_one_number_that_is_not_finite_is_enough_to_skip_an_update(features, generator):
    layer = nn.Linear(features, 300, bias=False)
    opt = VOGN(layer, num_data=40)
    with opt.sampled_params():
        layer(torch.randn(4, features, generator=generator)).square().mean().backward()
    layer.weight.grad[-1, -1] = torch.nan
    with pytest.warns(UserWarning, match="non-finite gradient or curvature"):
        opt.step()
    assert opt.num_updates == 0


def test_relative_noise_sets_the_scale_and_the_curvature_the_places(generator):
    """1/Σ ∝ s + δ̃ + 0.03 mean s, with a mean variance of κ²r² if the data allow more."""
    x, y = regression(generator)
    model = linear()
    opt = VOGN(model, lr=1e-3, num_data=40, relative_noise=0.01)
    train_on(opt, lambda: half_squares(model, x, y))
    s = opt.state[model.weight]["curvature"]
    size = torch.maximum(model.weight.square().mean().sqrt(), opt.state[model.weight]["initial_rms"])
    strength = s + 1.0 / 40 + 0.03 * s.mean()
    q = opt.posterior()
    precision = strength * (40 + (1 / strength).mean() / (0.01 * size) ** 2)
    torch.testing.assert_close(q.precision["weight"], precision)
    assert q.variance()["weight"].mean().sqrt() == pytest.approx(0.01 * size.item(), rel=1e-3)
    assert opt.effective_parameters().item() == pytest.approx(float((s / strength).sum()))
    torch.testing.assert_close(1 - q.prior_precision["weight"] / q.precision["weight"], s / strength)


@pytest.mark.parametrize("change", ["step", "load", "prior"])
def test_the_noise_of_a_pass_is_always_that_of_the_posterior(generator, change):
    """Caches between passes are never stale: samples with one ε, in units of the posterior's width, are that ε."""
    x, y = regression(generator)
    model = linear()
    opt = VOGN(model, lr=1e-3, num_data=40, relative_noise=0.1)
    standard = []
    for _ in range(3):
        train_on(opt, lambda: half_squares(model, x, y))
        if change == "load":
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        if change == "prior":
            opt.param_groups[0]["posterior"]["prior_precision"] *= 100
        with torch.no_grad():
            (drawn,) = opt.draw_sample(CounterNoise(0)).values()
        standard.append((drawn - model.weight.detach()) * opt.posterior().precision["weight"].sqrt())
    for other in standard[1:]:
        torch.testing.assert_close(other, standard[0])


def test_bad_hyperparameters_are_all_named():
    with pytest.raises(HyperparameterError, match=r"lr=-1 must be at least 0; prior_precision=0 must be above 0"):
        VOGN(linear(), lr=-1, prior_precision=0)
    with pytest.raises(HyperparameterError, match=r"kl_weight=nan must be above 0"):
        VOGN(linear(), kl_weight=math.nan)


def test_misuse_is_explained():
    with (
        pytest.raises(HyperparameterError, match=r"num_data is not set\. Pass num_data=len"),
        VOGN(linear()).sampled_params(),
    ):
        pass
    with pytest.raises(HyperparameterError, match="Linear has no trainable parameter"):
        VOGN(linear().requires_grad_(False))
    with pytest.raises(UnsupportedTrainingError, match=r"Parameters are stored as torch\.bfloat16"):
        VOGN(linear().bfloat16())
