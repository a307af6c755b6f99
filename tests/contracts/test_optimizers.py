"""What every noisy optimizer promises; new ones are found by themselves."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import OPTIMIZERS
from torch import nn

STEP_RULES = ["natural", "trust_region", "user"]
CASES = [(cls, rule) for cls in OPTIMIZERS for rule in STEP_RULES if rule != "user" or cls.default_step == "user"]
pytestmark = pytest.mark.parametrize(("optimizer", "step_rule"), CASES, ids=[f"{c.__name__}-{r}" for c, r in CASES])


@pytest.fixture
def problem(generator):
    x = torch.randn(32, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


def build(optimizer, step_rule, **arguments):
    torch.manual_seed(0)
    # BackPACK has no Hessian of BatchNorm in training mode, and says so.
    norm = nn.Identity() if optimizer.measures.startswith("diag_") else nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(inplace=True), nn.Linear(8, 2))
    if step_rule == "user":
        base = torch.optim.Adam(model.parameters(), lr=1e-2)
        return model, optimizer(model, base=base, num_data=3200, **arguments)
    return model, optimizer(model, lr=1e-2, num_data=3200, step_rule=step_rule, **arguments)


def flat(state):
    """Values of a parameter's state, the user's optimizer's included."""
    return [leaf for value in state.values() for leaf in (flat(value) if isinstance(value, dict) else [value])]


def train(model, opt, problem, steps):
    x, y = problem
    for _ in range(steps):
        with opt.sampled_params():
            F.cross_entropy(model(x), y).backward()
        opt.step()


def test_it_learns(optimizer, step_rule, problem):
    model, opt = build(optimizer, step_rule)
    x, y = problem
    before = F.cross_entropy(copy.deepcopy(model)(x), y)
    train(model, opt, problem, 100)
    assert F.cross_entropy(model(x), y) < 0.5 * before


def test_weights_between_steps_are_the_mean(optimizer, step_rule, problem):
    model, opt = build(optimizer, step_rule)
    train(model, opt, problem, 2)
    mean = [p.detach().clone() for p in model.parameters()]
    with opt.sampled_params():
        F.cross_entropy(model(problem[0]), problem[1]).backward()
    assert all(torch.equal(p, m) for p, m in zip(model.parameters(), mean, strict=True))


def test_the_mean_stays_in_its_memory_during_a_pass_that_breaks(optimizer, step_rule, problem):
    model, opt = build(optimizer, step_rule)
    train(model, opt, problem, 2)
    memory = [p.data for p in model.parameters()]
    kept = [values.clone() for values in memory]
    during = []

    def broken_pass():
        with opt.sampled_params():
            during.extend(values.clone() for values in memory)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        broken_pass()
    assert all(map(torch.equal, during, kept))
    assert all(p.data_ptr() == m.data_ptr() for p, m in zip(model.parameters(), memory, strict=True))
    assert all(map(torch.equal, memory, kept))


def test_resume_from_a_safely_loaded_state_is_bit_equal(optimizer, step_rule, problem):
    model, opt = build(optimizer, step_rule)
    train(model, opt, problem, 3)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    train(model, opt, problem, 3)
    other, resumed = build(optimizer, step_rule)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, problem, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    for mine, theirs in zip(opt.state.values(), resumed.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(flat(mine), flat(theirs), strict=True)
        )


def test_tensors_live_in_the_parameters_state(optimizer, step_rule, problem):
    """Lightning and torch move `optimizer.state` between devices, and nothing else."""
    model, opt = build(optimizer, step_rule)
    train(model, opt, problem, 1)
    for group in opt.param_groups:
        assert not any(isinstance(v, torch.Tensor) for k, v in group.items() if k != "params")
    assert all(p in opt.state for p in model.parameters())


def test_global_random_numbers_are_untouched(optimizer, step_rule, problem):
    model, opt = build(optimizer, step_rule)
    state = torch.get_rng_state()
    train(model, opt, problem, 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_update_that_is_not_finite_changes_nothing(optimizer, step_rule, problem):
    model, opt = build(optimizer, step_rule)
    train(model, opt, problem, 2)
    kept = copy.deepcopy(model.state_dict())
    with opt.sampled_params():
        F.cross_entropy(model(problem[0] * torch.nan), problem[1]).backward()
    with pytest.warns(UserWarning, match="is skipped, the posterior is unchanged"):
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), kept.values(), strict=True))


def test_frozen_parameters_stay(optimizer, step_rule, problem):
    model, opt = build(optimizer, step_rule)
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    train(model, opt, problem, 3)
    assert torch.equal(model[0].weight, frozen)


def test_both_engines_take_the_same_step(optimizer, step_rule, problem):
    if optimizer.measures == "kronecker":
        pytest.skip("BackPACK's factors have no column for the bias")
    weights = []
    for engine in ("fused", "backpack"):
        model, opt = build(optimizer, step_rule, engine=engine)
        train(model, opt, problem, 3)
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
