"""Copies and pickles of optimizers keep the groups shared with the user's optimizer, and the state of the parameters."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import OPTIMIZERS, construct
from torch import nn

from lightning_bayes import VOGN, NoisyKFAC


def through_torch_save(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch": through_torch_save,
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def train(model, optimizer, updates):
    generator = torch.Generator().manual_seed(optimizer.num_updates)
    for _ in range(updates):
        x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        with optimizer.sampled_params():
            F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        optimizer.step()


def values(model, optimizer):
    stored = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [*model.parameters(), *stored]


def assert_equal(one, other):
    assert all(map(torch.equal, one, other))
    assert len(one) == len(other)


@every_way
@pytest.mark.parametrize("updates", [0, 12])
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_a_copy_goes_on_like_its_original_and_leaves_it_alone(kind, updates, way):
    model = network()
    optimizer = construct(kind, model, num_data=100)
    train(model, optimizer, updates)
    before = [value.clone() for value in values(model, optimizer)]
    twin, other = way((model, optimizer))
    train(twin, other, 3)
    assert_equal(values(model, optimizer), before)
    train(model, optimizer, 3)
    assert_equal(values(model, optimizer), values(twin, other))


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning")  # torch's, for a copy of any optimizer
@every_way
@pytest.mark.parametrize("kind", [VOGN, NoisyKFAC])
def test_a_copy_shares_its_groups_with_its_own_copy_of_the_users_optimizer(kind, way):
    model = network()
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = kind(model, base=base, num_data=100)
    schedule = torch.optim.lr_scheduler.StepLR(base, 1, gamma=0.5)
    train(model, optimizer, 3)
    twin, copied_base, other, copied_schedule = way((model, base, optimizer, schedule))
    assert other.param_groups is copied_base.param_groups
    assert other.param_groups is not base.param_groups
    copied_schedule.step()
    assert [group["lr"] for group in other.param_groups] == [0.5e-2]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2]
    schedule.step()
    train(model, optimizer, 3)
    train(twin, other, 3)
    assert_equal(values(model, base), values(twin, copied_base))
    assert_equal(values(model, optimizer), values(twin, other))


@every_way
def test_the_posterior_of_a_copy_is_that_of_the_original(way):
    model = network()
    optimizer = VOGN(model, base=torch.optim.Adam(model.parameters()), num_data=100)
    train(model, optimizer, 3)
    _, other = way((model, optimizer))
    assert_equal([*optimizer.posterior().mean.values()], [*other.posterior().mean.values()])
    draws = [each.posterior().sample(torch.Generator().manual_seed(1)) for each in (optimizer, other)]
    assert_equal([*draws[0].values()], [*draws[1].values()])
