"""The natural direction at the length of the user's step, against a twin that the user's optimizer moves."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_training import Classifier, loader, quiet_trainer
from torch import nn

from lightning_bayes import NoisyKFACCallback, OGNCallback, VOGNCallback
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim import VOGN
from lightning_bayes.optim.runtime import blocks
from lightning_bayes.optim.steps import BaseOptimizerStep
from lightning_bayes.optim.steps.graft import Steps, turn_
from lightning_bayes.posteriors import root_mean_squares

EXAMPLES = 12
OPTIMIZERS = {
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=3.0),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
}
MOMENTUM = {"Adam": "exp_avg", "AdamW": "exp_avg", "SGD": "momentum_buffer"}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(EXAMPLES, 4, generator=generator), torch.randint(3, (EXAMPLES,), generator=generator)


def after_one_grafted_step(name):
    """The steps of both, parameter by parameter, with the state that made them."""
    model = network()
    base = OPTIMIZERS[name](model.parameters())
    decay = base.param_groups[0]["weight_decay"] if name == "AdamW" else 0.0
    step = BaseOptimizerStep(base, grafts=True)
    optimizer = VOGN(model, base=step, num_data=EXAMPLES, relative_noise=0.1, weight_decay=decay)
    for x, y in batches(3):
        twin, starts = copy.deepcopy(model), [param.detach().clone() for param in model.parameters()]
        other = OPTIMIZERS[name](twin.parameters())
        other.load_state_dict(copy.deepcopy(base.state_dict()))
        with optimizer.sampled_params():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for mine, param in zip(model.parameters(), twin.parameters(), strict=True):
            param.grad = mine.grad.clone()  # with the prior's
        other.step()
        optimizer.zero_grad()
    rate = base.param_groups[0]["lr"]
    for param, theirs, start in zip(model.parameters(), twin.parameters(), starts, strict=True):
        kept = start * (1 - rate * decay)
        yield param.detach() - kept, theirs.detach() - kept, base.state[param], optimizer.state[param], theirs.grad


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_as_long_as_the_users_and_has_the_natural_direction(name):
    for mine, theirs, base_state, state, gradient in after_one_grafted_step(name):
        torch.testing.assert_close(*(root_mean_squares([step])[0] for step in (mine, theirs)), rtol=1e-4, atol=0)
        momentum = base_state[MOMENTUM[name]] if name in MOMENTUM else gradient
        direction = momentum / (state["curvature"] + state["curvature"].mean())
        cosine = F.cosine_similarity(mine.flatten(), direction.flatten(), dim=0)
        assert cosine == pytest.approx(-1, abs=1e-4)
        assert F.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0) < 0.9999


def test_without_curvature_the_direction_is_the_momentum():
    end, momentum = torch.tensor([-2.0, 1.0]), torch.tensor([1.0, -2.0])
    turn_(Steps([end], [torch.zeros(2)], [torch.zeros(2)], [momentum]))
    torch.testing.assert_close(end, -momentum)


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_blocks_do_not_change_a_step(monkeypatch, layout):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2, 2, 5), (7,), (2, 3, 4, 5), (1, 1), (6,)]
    ends, starts, roots, momenta = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4))
    if layout == "channels last":
        ends[0], momenta[2] = (t.to(memory_format=torch.channels_last) for t in (ends[0], momenta[2]))
    curvatures, expected = [root.square() for root in roots], []
    for end, start, s, m in zip(ends, starts, curvatures, momenta, strict=True):
        direction = m / (s + s.mean())
        expected.append(start - direction * (end - start).norm() / direction.norm())
    monkeypatch.setattr(blocks, "CACHED_ELEMENTS", 8)
    turn_(Steps(ends, starts, curvatures, momenta))
    torch.testing.assert_close(ends, expected)


def test_a_fit_takes_it_without_a_learning_rate():
    module = Classifier()
    callback = VOGNCallback(step="natural")
    quiet_trainer(callback, max_epochs=2).fit(module, loader())
    assert callback.optimizer.base_step.grafts
    assert all(param.isfinite().all() for param in module.parameters())
    assert callback.optimizer.param_groups[0]["step_rule"] == "user"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: NoisyKFACCallback(step="natural"), "NoisyKFACCallback got step='natural' without lr"),
        (
            lambda: OGNCallback(step="user"),
            "OGNCallback got step='user', but it would then be the user's optimizer alone",
        ),
        (lambda: VOGNCallback(step="user", lr=0.1), "VOGNCallback got step='user', but lr=0.1 sets the natural step"),
        (lambda: VOGNCallback(step="steep"), "VOGNCallback got step='steep'. Pass 'user', 'natural' or nothing."),
    ],
    ids=["Kronecker", "no posterior", "a learning rate", "unknown"],
)
def test_a_step_that_does_not_fit_is_refused(build, message):
    with pytest.raises(HyperparameterError, match=message):
        build()


def test_with_a_learning_rate_it_is_the_papers():
    assert VOGNCallback(step="natural", lr=0.1).group_defaults["step_rule"] == "natural"
    assert OGNCallback(step="natural").group_defaults["step_rule"] == "trust_region"
