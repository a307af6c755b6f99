"""VIME: the gain beside explicit Gaussians, the dynamics' passes beside autograd, and the callback around TRPO."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

pytest.importorskip("sb3_contrib", reason="TRPO is in sb3-contrib, of the extra bench")

from sb3_contrib import TRPO
from stable_baselines3.common.callbacks import BaseCallback

from benchmarks.papers.vime import __main__ as command
from benchmarks.papers.vime.dynamics import GAIN_STEP, NOISE_STD, Dynamics, Moves
from benchmarks.papers.vime.gain import LayerPass, diagonal_gain, matrix_gain

OUT, IN, PRECISION = 3, 4, 4.0
SMALL = 1e-5


@pytest.fixture
def layer(generator):
    """A linear layer with a Gaussian likelihood and one transition: mean, Σ₁, Σ₂, a, y."""
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    left, right = (m @ m.T / len(m) + 0.5 * torch.eye(len(m)).double() for m in (randn(OUT, OUT), randn(IN, IN)))
    return randn(OUT, IN), left, right, randn(IN), randn(OUT)


def bound(mean, covariance, a, y):
    """E_q[log p(y | W a)] for any Gaussian q(vec W), row by row, up to a constant."""
    outputs = torch.kron(torch.eye(OUT).double(), a[None])
    spread = outputs @ covariance @ outputs.T
    return -0.5 * PRECISION * ((y - mean @ a).square().sum() + spread.trace())


def divergence(mean, covariance, start_mean, start):
    new, old = (MultivariateNormal(m.reshape(-1), c) for m, c in ((mean, covariance), (start_mean, start)))
    return kl_divergence(new, old)


def seen(mean, a, y):
    roots = PRECISION**0.5 * torch.eye(OUT).double()
    return LayerPass(a[None], (PRECISION * (y - mean @ a))[None], roots[None])


def test_the_matrix_variate_gain_is_the_kl_of_two_gaussians_to_first_order(layer):
    mean, left, right, a, y = layer
    parts = [part.clone().requires_grad_() for part in (mean, left, right)]
    of_mean, of_left, of_right = torch.autograd.grad(bound(parts[0], torch.kron(parts[1], parts[2]), a, y), parts)
    start = torch.kron(left, right)
    moved = mean + SMALL * left @ of_mean @ right
    wider = left + SMALL * (2 / IN) * left @ of_left @ left
    deeper = right + SMALL * (2 / OUT) * right @ of_right @ right
    expected = (
        divergence(moved, start, mean, start)
        + divergence(mean, torch.kron(wider, right), mean, start)
        + divergence(mean, torch.kron(left, deeper), mean, start)
    )
    (gain,) = matrix_gain(seen(mean, a, y), left, right, SMALL)
    torch.testing.assert_close(gain, expected, rtol=1e-3, atol=0)


def test_the_mean_field_gain_is_the_kl_of_two_gaussians_to_first_order(layer):
    mean, _, _, a, y = layer
    variance = (torch.arange(12).double().view(OUT, IN) + 1) / 12
    parts = [part.clone().requires_grad_() for part in (mean, variance)]
    of_mean, of_variance = torch.autograd.grad(bound(parts[0], parts[1].flatten().diag(), a, y), parts)
    moved = mean + SMALL * variance * of_mean
    changed = variance + SMALL * 2 * variance.square() * of_variance
    expected = divergence(moved, changed.flatten().diag(), mean, variance.flatten().diag())
    (gain,) = diagonal_gain(seen(mean, a, y), variance, SMALL)
    torch.testing.assert_close(gain, expected, rtol=1e-3, atol=0)


def some_moves(generator, n=40):
    inputs = torch.randn(n, 3, generator=generator)
    following = inputs[:, :2] + 0.1 * torch.stack([inputs[:, 1], inputs[:, 2]], 1)
    return Moves(inputs, following)


@pytest.fixture(params=["bbb", "mvg"])
def trained(request, generator):
    dynamics = Dynamics(request.param, state=2, action=1, seed=0)
    dynamics.add(some_moves(generator))
    return dynamics, dynamics.train(40)


def test_what_the_layers_see_is_autograds(trained, generator):
    dynamics, _ = trained
    moves = some_moves(generator, 3)
    passes = dynamics._passes(moves)
    for b in range(3):
        x, y = moves.inputs[b], moves.following[b]
        output = dynamics.net(x)
        log_p = -0.5 * (y - output).square().sum() / NOISE_STD**2
        for name, found in zip(("0", "2"), passes, strict=True):
            params = [dynamics.net.get_parameter(f"{name}.{kind}") for kind in ("weight", "bias")]
            grads = torch.autograd.grad(log_p, params, retain_graph=True)
            joined = torch.cat([grads[0], grads[1][:, None]], 1)
            torch.testing.assert_close(torch.outer(found.grads[b], found.inputs[b]), joined)
            for k in range(2):
                (of_bias,) = torch.autograd.grad(output[k] / NOISE_STD, [params[1]], retain_graph=True)
                torch.testing.assert_close(found.roots[b, k], of_bias)


def test_gains_are_positive_and_larger_far_from_the_pool(trained, generator):
    dynamics, error = trained
    assert error < 2
    near = dynamics.gain(some_moves(generator))
    far = dynamics.gain(Moves(*(5 * part for part in some_moves(generator))))
    assert near.min() >= 0
    assert far.median() > 5 * near.median()


def test_the_gain_of_a_matrix_variate_model_is_that_of_its_posterior(generator):
    """The mean's part, as a squared distance under the posterior that the optimizer reads out."""
    dynamics = Dynamics("mvg", state=2, action=1, seed=0)
    dynamics.add(some_moves(generator))
    dynamics.train(20)
    q, moves = dynamics.optimizer.posterior(), some_moves(generator, 1)
    x, y = (part[0] for part in dynamics.standardised(moves))
    names = dict(dynamics.net.named_parameters())
    log_p = -0.5 * (y - dynamics.net(x)).square().sum() / NOISE_STD**2
    grads = dict(zip(names, torch.autograd.grad(log_p, list(names.values())), strict=True))
    of_mean = 0.0
    for layer in ("0", "2"):
        joined = torch.cat([grads[f"{layer}.weight"], grads[f"{layer}.bias"][:, None]], 1)
        left, right = q.factors[f"{layer}.weight"]
        of_mean += 0.5 * GAIN_STEP**2 * (joined * torch.linalg.solve(left, joined) @ right.inverse()).sum()
    (gain,) = dynamics.gain(moves)
    assert of_mean < gain < 10 * of_mean + 1e-3


def test_the_pool_forgets_the_oldest(generator, monkeypatch):
    monkeypatch.setattr("benchmarks.papers.vime.dynamics.POOL", 50)
    dynamics = Dynamics("bbb", state=2, action=1, seed=0)
    first, second = some_moves(generator), some_moves(generator)
    dynamics.add(first)
    dynamics.add(second)
    torch.testing.assert_close(dynamics.pool.inputs, torch.cat([first.inputs[30:], second.inputs]))


@pytest.fixture
def trpo(monkeypatch):
    monkeypatch.setattr(command, "PATH", 30)
    car = command.SparseCar()
    return TRPO("MlpPolicy", car, n_steps=80, batch_size=80, gae_lambda=1.0, seed=0, device="cpu"), car


def test_the_transitions_are_those_of_the_car(trpo):
    """Also where an episode ends: the state before the reset."""
    model, car = trpo
    bonus = command.InformationGain(Dynamics("bbb", 2, 1, seed=0), [car], updates=1)
    model.learn(80, callback=bonus)
    (position, velocity, force), following = bonus.dynamics.pool.inputs.T, bonus.dynamics.pool.following
    moved = (velocity + 0.0015 * force - 0.0025 * (3 * position).cos()).clamp(-0.07, 0.07)
    torch.testing.assert_close(following[:, 1], moved, atol=1e-6, rtol=0)
    torch.testing.assert_close(following[:, 0], position + moved, atol=1e-6, rtol=0)
    assert (bonus.history["episodes"], bonus.history["successes"]) == ([2], [0])
    assert len(bonus.history["errors"]) == 1


class Note(BaseCallback):
    """Records rewards and returns after each rollout."""

    def __init__(self, noted):
        super().__init__()
        self.noted = noted

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        buffer = self.model.rollout_buffer
        self.noted.append((torch.tensor(buffer.rewards[:, 0]), torch.tensor(buffer.returns[:, 0])))


def test_the_bonus_enters_rewards_and_returns_from_the_second_rollout_on(trpo, monkeypatch):
    monkeypatch.setattr(Dynamics, "gain", lambda self, moves: torch.full((len(moves.inputs),), 7.0))
    (model, car), noted = trpo, []
    bonus = command.InformationGain(Dynamics("bbb", 2, 1, seed=0), [car], updates=1)
    model.learn(160, callback=[Note(noted), bonus, Note(noted)])
    first, first_after, second, second_after = noted
    assert torch.equal(first[0], first_after[0])
    expected = torch.full((80,), command.WEIGHT)
    torch.testing.assert_close(second_after[0] - second[0], expected, atol=1e-7, rtol=0)
    ends = [i for i, start in enumerate(model.rollout_buffer.episode_starts[:, 0]) if start] or [80]
    to_end = ends[0] if ends[0] else ends[1]
    sooner = command.WEIGHT * sum(0.99**k for k in range(to_end))
    assert float(second_after[1][0] - second[1][0]) == pytest.approx(sooner, abs=2e-5)


def test_the_command_runs_keeps_and_resumes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "PATH", 30)
    arguments = ["--methods", "none", "mvg", "--seeds", "1", "--iterations", "2", "--steps", "400", "--updates", "3"]
    arguments += ["--json", str(tmp_path / "vime.json")]
    command.main(arguments)
    rows = json.loads((tmp_path / "vime.json").read_text("utf-8"))["results"]
    found = [(row["method"], len(row["successes"]), len(row["errors"])) for row in rows]
    assert found == [("none", 2, 0), ("mvg", 2, 2)]
    assert all(math.isfinite(error) for error in rows[1]["errors"])
    monkeypatch.setattr(command, "run", None)
    command.main(arguments)
    printed = capsys.readouterr().out
    assert "| VIME, matrix-variate | 2 | 0 | 0 of 20 |" in printed
    assert "matrix-variate has more successes than no bonus on 0 of 1 seeds" in printed
