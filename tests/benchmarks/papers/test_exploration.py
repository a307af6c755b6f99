"""DDPG on the pendulum: the noise of each method, its equivalence with the released rule, and a short run."""

from __future__ import annotations

import json
import math

import pytest
import torch

pytest.importorskip("gymnasium", reason="the environments need gymnasium, of the extra bench")

from benchmarks.papers import exploration as command

SMALL = ["--environment", "Pendulum-v1", "--hidden", "8", "8", "--test-episodes", "1"]


def actor():
    torch.manual_seed(0)
    return command.make_actor(3, 1, [8, 8])


def flat(module):
    return torch.cat([param.detach().flatten() for param in module.parameters()])


@pytest.mark.parametrize(
    ("method", "std"), [("vadam", 0.01), ("vadagrad", 0.01), ("adam_explore", 0.01), ("sgd_plain", 0.0)]
)
def test_the_first_noise_is_the_printed_one_and_is_taken_back(method, std):
    net = actor()
    _, sampling = command.explorer(method, net, seed=0)
    mean, draws = flat(net), []
    for _ in range(200 if method == "adam_explore" else 1):
        with sampling():
            draws.append(flat(net) - mean)
        assert torch.equal(flat(net), mean)
    found = torch.stack(draws)
    error = std / math.sqrt(2 * found.numel())
    assert abs(found.square().mean().sqrt() - std) <= 4 * error + 1e-12


def test_vadam_on_the_mean_loss_is_the_released_rule_on_the_sum():
    """m ← .9 m + .1 (G + λμ), s ← .999 s + .001 G², μ ← μ - α m̂ / (√ŝ + λ) with G = M ĝ, as λ and ε vanish."""
    net = actor()
    optimizer, sampling = command.explorer("vadam", net, seed=0)
    mean, m, s = flat(net).double(), 0.0, 0.0
    for step in range(1, 6):
        with sampling():
            optimizer.zero_grad()
            net(torch.full((command.BATCH, 3), 0.1 * step)).mean().backward()
            gradient = command.BATCH * torch.cat([param.grad.flatten() for param in net.parameters()]).double()
        optimizer.step()
        m, s = 0.9 * m + 0.1 * (gradient + 1e-8 * mean), 0.999 * s + 0.001 * gradient**2
        mean = mean - 1e-4 * (m / (1 - 0.9**step)) / ((s / (1 - 0.999**step)).sqrt() + 1e-8)
    moved = gradient != 0
    torch.testing.assert_close(flat(net).double()[moved], mean[moved], atol=1e-6, rtol=0)


def test_targets_follow_the_means_slowly():
    options = command.argparse.Namespace(environment="Pendulum-v1", hidden=[8, 8], steps=80)
    learner = command.DDPG("vadam", 0, options)
    for _ in range(command.BATCH + 1):
        before = flat(learner.targets)
        learner.step()
    online = torch.cat([flat(learner.actor), flat(learner.critic)])
    torch.testing.assert_close(flat(learner.targets), torch.lerp(before, online, command.TARGET_RATE))
    assert not torch.equal(before, online)


@pytest.mark.parametrize("method", command.RELEASED)
def test_every_method_runs_is_tested_and_is_not_repeated(method, tmp_path, monkeypatch, capsys):
    arguments = [*SMALL, "--methods", method, "--seeds", "1", "--steps", "70", "--test-every", "40"]
    command.main([*arguments, "--json", str(tmp_path / "r.json")])
    (row,) = json.loads((tmp_path / "r.json").read_text("utf-8"))["results"]
    assert (len(row["returns"]), row["done"]) == (2, 70)
    assert all(-2000 < value < 0 for value in row["returns"])  # of 200 steps on the pendulum
    monkeypatch.setattr(command, "run", None)
    command.main([*arguments, "--json", str(tmp_path / "r.json")])
    assert f"| {method} | 1 | 70 |" in capsys.readouterr().out
