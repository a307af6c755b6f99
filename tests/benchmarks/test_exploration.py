"""DDPG with noise in the weights: the released rule, the stacked runs, the callback, and what the report claims."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.papers.exploration import __main__ as command
from benchmarks.papers.exploration import environments, report
from benchmarks.papers.exploration.explorers import METHODS, PRIOR, precision_gradient
from benchmarks.papers.exploration.figures import draw_strip
from benchmarks.papers.exploration.networks import Sizes, act, initial_weights, value
from benchmarks.papers.exploration.replay import Replay
from benchmarks.papers.exploration.setting import BATCH, MAX_NOISE, NUM_DATA, START_PRECISION, Setting
from lightning_bayes.optim import VadaGrad, Vadam

LAMBDA, C = 1e-8, 1e4


# -- the released rule ----------------------------------------------------------------------------------------------------


def released_vadam(mean, m, s, g, t, *, lr=1e-4, gamma1=0.9, gamma2=0.999):
    """As released: g is the gradient of the sum over a batch."""
    m = gamma1 * m + (1 - gamma1) * (g + LAMBDA * mean)
    s = gamma2 * s + (1 - gamma2) * g**2
    return mean - lr * (m / (1 - gamma1**t)) / ((s / (1 - gamma2**t)).sqrt() + LAMBDA), m, s


def released_vadagrad(mean, m, s, g, t, *, lr=1e-2, gamma2=0.99):
    s = s + (1 - gamma2) * g**2
    return mean - lr * g / s.sqrt(), m, s


VADAM = {"lr": 1e-4, "betas": (0.9, 0.999), "init_precision": LAMBDA, "max_noise": MAX_NOISE}
VADAGRAD = {"lr": 1e-2, "betas": (0.0, 0.99), "init_precision": START_PRECISION}


@pytest.mark.parametrize(
    ("build", "arguments", "rule", "start", "precision_of"),
    [
        (Vadam, VADAM, released_vadam, 0.0, lambda s: s + LAMBDA + C),
        (VadaGrad, VADAGRAD, released_vadagrad, START_PRECISION, lambda s: s),
    ],
)
def test_the_mean_gradient_with_n_of_m_squared_is_the_released_rule(
    build, arguments, rule, start, precision_of, generator
):
    x = torch.randn(BATCH, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(BATCH, 2, generator=generator, dtype=torch.float64)
    model = nn.Linear(4, 2, bias=False).double()
    opt = build(model, num_data=NUM_DATA, prior_precision=LAMBDA, **arguments)
    mean = model.weight.detach().clone()
    m, s = torch.zeros_like(mean), torch.full_like(mean, start)
    for t in range(1, 51):
        centre, precision = model.weight.detach().clone(), opt.posterior().precision["weight"]
        torch.testing.assert_close(precision, precision_of(s), rtol=1e-6, atol=0)
        with opt.sampled_params():
            epsilon = (model.weight.detach() - centre) * precision.sqrt()
            (model(x) - y).square().sum(1).mean().backward()
        opt.step()
        opt.zero_grad()
        theta = (mean + epsilon * precision_of(s).rsqrt()).requires_grad_()
        (g,) = torch.autograd.grad((x @ theta.T - y).square().sum(), [theta])
        mean, m, s = rule(mean, m, s, g, t)
    assert (model.weight - mean).abs().max() < 1e-7
    torch.testing.assert_close(NUM_DATA * opt.state[model.weight]["curvature"], s, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("method", "build", "arguments"), [("vadam", Vadam, VADAM), ("vadagrad", VadaGrad, VADAGRAD)])
def test_stacked_runs_take_the_optimizers_steps(method, build, arguments, generator):
    x, y = torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)
    model = nn.Linear(3, 1, bias=False)
    opt = build(model, num_data=NUM_DATA, prior_precision=LAMBDA, **arguments)
    explorer = METHODS[method].explorer(model.weight.detach().clone())
    for _ in range(5):
        centre = model.weight.detach().clone()
        with opt.sampled_params():
            theta = model.weight.detach().clone()
            F.mse_loss(model(x), y).backward()
            grad = model.weight.grad.clone()
        epsilon = (theta - centre) * opt.posterior().precision["weight"].sqrt()
        opt.step()
        opt.zero_grad()
        torch.testing.assert_close(explorer.draw(epsilon), theta)
        explorer.update(grad, epsilon)
    torch.testing.assert_close(explorer.mean, model.weight.detach())


def test_plain_methods_are_those_of_torch(generator):
    start = torch.randn(2, 5, generator=generator)
    grads = torch.randn(4, 2, 5, generator=generator)
    for name, build in (
        ("sgd_plain", lambda p: torch.optim.SGD(p, lr=1e-4 * BATCH)),
        ("adam_plain", lambda p: torch.optim.Adam(p, lr=1e-4)),
    ):
        explorer, param = METHODS[name].explorer(start.clone()), nn.Parameter(start.clone())
        opt = build([param])
        for grad in grads:
            param.grad = grad.clone()
            opt.step()
            assert torch.equal(explorer.draw(torch.ones(2, 5)), explorer.mean)
            explorer.update(grad, torch.ones(2, 5))
        torch.testing.assert_close(explorer.mean, param.detach())


def test_the_gradient_of_a_precision_is_autograds(generator):
    mean, epsilon, x = (torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    precision = torch.full_like(mean, 4.0, requires_grad=True)
    theta = mean + epsilon / precision.sqrt()
    loss = (theta * x).sin().sum()  # the mean over a batch
    (grad, of_precision) = torch.autograd.grad(BATCH * loss, [theta, precision])
    torch.testing.assert_close(precision_gradient(grad / BATCH, epsilon, precision.detach()), of_precision)


@pytest.mark.parametrize("method", ["sgd_explore", "adam_explore"])
def test_exploring_baselines_keep_their_noise(method, generator):
    """As in the released code: the precision hardly moves from 1e4."""
    explorer = METHODS[method].explorer(torch.zeros(1, 50))
    for _ in range(100):
        explorer.update(torch.randn(1, 50, generator=generator), torch.randn(1, 50, generator=generator))
    assert (explorer.precision().rsqrt() - 0.01).abs().max() < 1e-5


# -- networks and transitions ---------------------------------------------------------------------------------------------


def test_stacked_networks_are_those_of_torch(generator):
    sizes = Sizes(3, 2, (5, 4))
    flat = torch.stack([initial_weights(sizes.actor, generator) for _ in range(2)])
    observations, actions = torch.randn(2, 6, 3, generator=generator), torch.rand(2, 6, 2, generator=generator)
    critics = torch.stack([initial_weights(sizes.critic, generator) for _ in range(2)])

    def layer(weights, at, inputs, outputs, x):
        w = weights[at : at + inputs * outputs].view(inputs, outputs)
        end = at + (inputs + 1) * outputs
        return F.linear(x, w.T, weights[at + inputs * outputs : end]), end

    for run in range(2):
        x, at = observations[run], 0
        for number, (inputs, outputs) in enumerate(sizes.actor):
            x, at = layer(flat[run], at, inputs, outputs, x)
            x = x.tanh() if number == 2 else x.relu()
        assert at == flat.shape[1]
        torch.testing.assert_close(act(flat, sizes, observations)[run], x)
        x, at = layer(critics[run], 0, 3, 5, observations[run])
        x, at = layer(critics[run], at, 7, 4, torch.cat([x.relu(), actions[run]], 1))
        x, at = layer(critics[run], at, 4, 1, x.relu())
        torch.testing.assert_close(value(critics, sizes, observations, actions)[run], x[:, 0])


def test_the_last_layer_starts_small(generator):
    sizes = Sizes(3, 2, (5, 4))
    assert initial_weights(sizes.actor, generator)[-10:].abs().max() <= 3e-3


def test_transitions_come_back():
    replay = Replay(2, 3, 2, 1)
    for number in range(3):
        of_run = torch.tensor([number, 10.0 + number])
        both = of_run[:, None].expand(2, 2)
        replay.add(both, -of_run[:, None], of_run + 0.5, of_run * 0, both + 1)
    batch = replay.at(torch.tensor([[2, 0], [1, 1]]))
    assert batch.observations[..., 0].tolist() == [[2, 0], [11, 11]]
    assert batch.actions[..., 0].tolist() == [[-2, 0], [-11, -11]]
    assert batch.rewards.tolist() == [[2.5, 0.5], [11.5, 11.5]]
    assert batch.following[..., 1].tolist() == [[3, 1], [12, 12]]


# -- with environments ----------------------------------------------------------------------------------------------------


@pytest.fixture
def pendulum():
    pytest.importorskip("gymnasium", reason="the extra rl is not installed")
    return Setting("Pendulum-v1", seeds=2, steps=110, hidden=(8, 8), test_every=60, test_episodes=1)


def test_all_methods_train_at_once_on_pendulum(pendulum, tmp_path, capsys, monkeypatch):
    files = {name: tmp_path / name for name in ("result.json", "curves.png", "policy.pt", "strip.png")}
    arguments = ["--environment", "Pendulum-v1", "--seeds", "2", "--steps", "110", "--hidden", "8", "8"]
    arguments += ["--test-every", "60", "--test-episodes", "1", "--json", str(files["result.json"])]
    command.main([*arguments, "--figure", str(files["curves.png"]), "--policy", str(files["policy.pt"])])
    printed = capsys.readouterr().out
    kept = json.loads(files["result.json"].read_text("utf-8"))
    assert kept["results"].keys() == METHODS.keys()
    for found in kept["results"].values():
        assert found["steps"] == [60, 110]
        assert all(-2000 < entry <= 0 for returns in found["returns"] for entry in returns)
    assert kept["results"]["vadam"]["noise"][-1] <= MAX_NOISE
    assert files["curves.png"].stat().st_size > 500
    monkeypatch.setattr(command, "train", None)  # what is in the file is not run again
    command.main(arguments)
    assert "| Vadam |" in printed
    assert "| Vadam |" in capsys.readouterr().out


def test_methods_share_first_weights_and_transitions_and_seeds_differ(pendulum):
    from benchmarks.papers.exploration.training import Learner

    learner = Learner(["adam_plain", "sgd_plain"], pendulum)
    for _ in range(BATCH - 1):
        learner.step()  # no update yet, and neither has noise
    first, second = learner.replay.at(torch.arange(4).expand(4, 4)).observations.split(2)
    torch.testing.assert_close(first, second)
    assert not torch.equal(first[0], first[1])
    means = learner.means().clone()
    learner.step()
    assert not torch.equal(learner.means(), means)
    assert learner.means().isfinite().all()


def test_target_networks_follow_the_means(pendulum):
    from benchmarks.papers.exploration.training import Learner

    learner = Learner(["vadam"], pendulum)
    for _ in range(BATCH - 1):
        learner.step()
    before = learner.target_actor.clone()
    learner.step()
    torch.testing.assert_close(learner.target_actor, before + 1e-3 * (learner.means() - before))


def stack(layers, flat):
    """A `torch.nn` network with flat weights."""
    found, at = [], 0
    for inputs, outputs in layers:
        layer = nn.Linear(inputs, outputs)
        weight, bias = flat[at:].split([inputs * outputs, outputs, len(flat) - at - (inputs + 1) * outputs])[:2]
        layer.weight.data, layer.bias.data = weight.view(inputs, outputs).T.clone(), bias.clone()
        found.append(layer)
        at += (inputs + 1) * outputs
    return nn.ModuleList(found)


def flatten(network):
    return torch.cat([part for layer in network for part in (layer.weight.T.flatten(), layer.bias)])


def policy(network, x):
    return network[2](network[1](network[0](x).relu()).relu()).tanh()


def quality(network, x, actions):
    return network[2](network[1](torch.cat([network[0](x).relu(), actions], 1)).relu())[:, 0]


def test_an_update_is_that_of_a_plain_ddpg_run_by_run(pendulum):
    """Two networks of `torch.nn` and two Adams for each run."""
    from benchmarks.papers.exploration.training import Learner

    learner = Learner(["adam_plain"], pendulum)
    for _ in range(BATCH - 1):
        learner.step()
    learner.target_actor += 0.1  # so that targets differ from the networks
    starts = [tensor.detach().clone() for tensor in (learner.means(), learner.critic)]
    targets = [tensor.clone() for tensor in (learner.target_actor, learner.target_critic)]
    learner.step()
    rows = torch.randint(BATCH, (2, BATCH), generator=torch.Generator().manual_seed(0))
    batch = learner.replay.at(rows)
    for run in range(2):
        of_run = zip((learner.sizes.actor, learner.sizes.critic) * 2, (*starts, *targets), strict=True)
        actor, critic, target_actor, target_critic = (stack(layers, flat[run]) for layers, flat in of_run)
        states, actions, rewards, terminated, following = (part[run] for part in batch)
        with torch.no_grad():
            future = quality(target_critic, following, policy(target_actor, following))
        by_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
        F.mse_loss(quality(critic, states, actions), rewards + 0.99 * (1 - terminated) * future).backward()
        by_critic.step()
        by_actor = torch.optim.Adam(actor.parameters(), lr=1e-4)
        (-quality(critic, states, policy(actor, states)).mean()).backward()
        by_actor.step()
        torch.testing.assert_close(learner.critic[run], flatten(critic), atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(learner.means()[run], flatten(actor), atol=1e-6, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*returned `None`")  # until there is a batch; Lightning says it once a process
def test_a_callback_trains_the_actor_and_its_noise_is_the_stated_one(pendulum):
    from lightning.pytorch import Trainer

    from benchmarks.papers.exploration.lightning_module import DDPG, vadam_callback

    torch.manual_seed(0)
    module, callback = DDPG(pendulum), vadam_callback()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    Trainer(max_epochs=1, accelerator="cpu", **quiet).fit(_with(module, callback))
    opt = callback.optimizer
    assert opt.num_updates == 110 - BATCH + 1
    assert [group["lr"] for group in opt.param_groups] == [1e-4, 1e-3]
    posterior = opt.posterior()
    assert all(name.startswith("actor.") for name in posterior.precision)
    for name, precision in posterior.precision.items():
        s = NUM_DATA * opt.state[module.get_parameter(name)]["curvature"]
        torch.testing.assert_close(precision, s + LAMBDA + C)
    assert all(param.isfinite().all() for param in module.parameters())


def _with(module, callback):
    module.configure_callbacks = lambda: [callback]
    return module


# -- bad input ------------------------------------------------------------------------------------------------------------


def test_a_missing_gymnasium_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.setattr(environments, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as caught:
        command.main(["--steps", "1"])
    assert str(caught.value) == "Not installed: gymnasium; run `pip install 'lightning-bayes[rl]'`."


def test_an_unknown_environment_and_one_without_numbers_are_refused():
    pytest.importorskip("gymnasium", reason="the extra rl is not installed")
    with pytest.raises(ValueError, match=r"gymnasium has no environment 'Nowhere-v1': .*pprint_registry"):
        environments.make("Nowhere-v1")
    with pytest.raises(ValueError, match=r"CartPole-v1 has the actions Discrete\(2\), but DDPG needs bounded numbers"):
        environments.make("CartPole-v1")


# -- the report -----------------------------------------------------------------------------------------------------------


def results(**last):
    return {
        name: {"steps": [1, 2], "returns": [[0.0] * len(values), values], "noise": [0.01, 0.01]}
        for name, values in last.items()
    }


def test_an_order_is_claimed_where_two_combined_standard_errors_lie_between():
    apart = results(vadam=[10.0, 12.0], adam_plain=[0.0, 2.0])  # errors 1 and 1: 10 > 2√2
    assert list(report.orders(apart)) == [
        "last test: Vadam is above Adam, plain, by 10",
        "mean of all tests: Vadam is above Adam, plain, by 5",
    ]
    near = results(vadam=[2.0, 4.0], adam_plain=[0.0, 2.0])
    assert list(report.orders(near)) == ["no two methods are two combined standard errors apart"]
    alone = results(vadam=[10.0], adam_plain=[0.0])
    assert list(report.orders(alone)) == ["the standard errors are unknown, because a method has one seed"]


def test_the_table_shows_every_seed_and_the_published_numbers():
    (line,) = report.table(results(vadam=[10.0, 12.0])).splitlines()[2:]
    assert line == "| Vadam | 11 ± 1 | 6 ± 0 | 0.0100 | 10, 12 | 1340 ± 187 | 3288 ± 167 |"
    assert math.isnan(report.mean_and_error([1.0])[1])


def test_frames_are_drawn_side_by_side(tmp_path):
    frame = torch.rand(8, 8, 3).numpy()
    draw_strip([frame, frame], ["step 0", "step 1"], "a title", tmp_path / "strip.png")
    assert (tmp_path / "strip.png").stat().st_size > 500


def test_the_prior_is_the_released_one_per_example():
    assert PRIOR * NUM_DATA == LAMBDA
