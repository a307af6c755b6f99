"""The contract of every noisy optimizer; new optimizers are found automatically."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import (
    OPTIMIZERS,
    chooses_engine,
    classifier,
    construct,
    step_rules,
    through_a_file,
    train_on,
    weights,
)

from lightning_bayes.errors import NoMeasurementError, NonFiniteError, UnsupportedTrainingError
from lightning_bayes.optim.groups import state_of

CASES = [(cls, rule) for cls in OPTIMIZERS for rule in step_rules(cls)]
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda cls: cls.__name__)
every_step = pytest.mark.parametrize(("optimizer", "step_rule"), CASES, ids=[f"{c.__name__}-{r}" for c, r in CASES])


@pytest.fixture
def problem(generator):
    x = torch.randn(32, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


def build(optimizer, step_rule="natural", **arguments):
    model = classifier(optimizer)
    return model, construct(optimizer, model, step_rule=step_rule, **arguments)


def flat(state):
    """Values of a parameter's state, including the user's optimizer's state."""
    return [leaf for value in state.values() for leaf in (flat(value) if isinstance(value, dict) else [value])]


def loss_of(model, problem):
    return F.cross_entropy(model(problem[0]), problem[1])


def train(model, opt, problem, steps):
    train_on(opt, lambda: loss_of(model, problem), steps)


def sampled(model, opt, number):
    """The weights of one sample."""
    with torch.no_grad(), opt.sampled_params(number):
        return weights(model)


def require_equal_states(model, opt, other, resumed):
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    for mine, theirs in zip(opt.state.values(), resumed.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        for a, b in zip(flat(mine), flat(theirs), strict=True):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


@every_step
def test_it_learns_within_a_hundred_updates(optimizer, step_rule, problem):
    """If a new optimizer cannot be built, add its required arguments to `optimizer_family.NEEDS`."""
    model, opt = build(optimizer, step_rule)
    before = loss_of(copy.deepcopy(model), problem)
    for _ in range(5):
        train(model, opt, problem, 20)
        if loss_of(model, problem) < 0.5 * before:
            return
    pytest.fail(f"The loss fell from {before:.3g} to {loss_of(model, problem):.3g} only.")


@every_step
def test_weights_between_steps_are_the_mean(optimizer, step_rule, problem):
    model, opt = build(optimizer, step_rule)
    train(model, opt, problem, 2)
    mean = weights(model)
    with opt.sampled_params():
        loss_of(model, problem).backward()
    assert torch.equal(weights(model), mean)


@every_step
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


@every_step
def test_resume_from_a_safely_loaded_state_is_bit_equal(optimizer, step_rule, problem):
    model, opt = build(optimizer, step_rule)
    train(model, opt, problem, 3)
    saved = through_a_file({"model": model.state_dict(), "optimizer": opt.state_dict()})
    train(model, opt, problem, 3)
    other, resumed = build(optimizer, step_rule)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, problem, 3)
    require_equal_states(model, opt, other, resumed)


@every_step
def test_tensors_live_in_the_parameters_state(optimizer, step_rule, problem):
    """Lightning and torch move `optimizer.state` between devices, and nothing else."""
    model, opt = build(optimizer, step_rule)
    train(model, opt, problem, 1)
    for group in opt.param_groups:
        assert not any(isinstance(v, torch.Tensor) for k, v in group.items() if k != "params")
    assert all(p in opt.state for p in model.parameters())


@every_step
def test_global_random_numbers_are_untouched(optimizer, step_rule, problem):
    model, opt = build(optimizer, step_rule)
    state = torch.get_rng_state()
    train(model, opt, problem, 2)
    assert torch.equal(torch.get_rng_state(), state)


@every_step
def test_the_seed_alone_decides_the_noise(optimizer, step_rule, problem):
    runs = []
    for seed, global_seed in ((3, 0), (3, 1), (4, 0)):
        model, opt = build(optimizer, step_rule, seed=seed)
        torch.manual_seed(global_seed)
        train(model, opt, problem, 3)
        runs.append((weights(model), sampled(model, opt, 0)))
    (mean, sample), again, other = runs
    assert torch.equal(mean, again[0])
    assert torch.equal(sample, again[1])
    is_noisy = not torch.equal(mean, sample)
    assert is_noisy != torch.equal(mean, other[0])


@every_step
def test_an_update_that_is_not_finite_changes_nothing(optimizer, step_rule, problem):
    model, opt = build(optimizer, step_rule)
    train(model, opt, problem, 2)
    kept, state = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    with opt.sampled_params():
        F.cross_entropy(model(problem[0] * torch.nan), problem[1]).backward()
    with pytest.warns(UserWarning, match="is skipped and the posterior is unchanged"):
        opt.step()
    assert all(map(torch.equal, model.state_dict().values(), kept.values()))
    for mine, before in zip(state_of(opt.state_dict()).values(), state_of(state).values(), strict=True):
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(flat(mine), flat(before), strict=True)
        )
    train(model, opt, problem, 1)  # training continues
    assert opt.skipped_steps == 1
    assert not torch.equal(weights(model), torch.cat([kept[n].flatten() for n, _ in model.named_parameters()]))


@every_optimizer
def test_too_many_updates_that_are_not_finite_stop_the_training(optimizer, problem):
    model, opt = build(optimizer, max_nonfinite_steps=1)
    with opt.sampled_params():
        F.cross_entropy(model(problem[0] * torch.nan), problem[1]).backward()
    with pytest.raises(NonFiniteError, match="Stopped at max_nonfinite_steps=1"):
        opt.step()


@every_optimizer
def test_a_closure_runs_under_k_samples(optimizer, problem):
    model, opt = build(optimizer, mc_samples=3)
    by_hand, other = build(optimizer, mc_samples=3)  # gradients of passes add up, and are divided by K
    seen = []

    def closure():
        opt.zero_grad()
        loss = loss_of(model, problem)
        loss.backward()
        seen.append(float(loss.detach()))
        return loss

    for update in range(2):
        loss = opt.step(closure)
        assert len(seen) == 3 * (update + 1)
        assert float(loss) == pytest.approx(sum(seen[-3:]) / 3)
        for sample in range(3):
            with other.sampled_params(sample):
                loss_of(by_hand, problem).backward()
        other.step()
    assert torch.equal(weights(model), weights(by_hand))


@every_optimizer
def test_equal_numbers_give_equal_noise_until_the_next_step(optimizer, problem):
    model, opt = build(optimizer)
    train(model, opt, problem, 2)
    first, again, other = (sampled(model, opt, number) for number in (0, 0, 1))
    assert torch.equal(first, again)
    is_noisy = not torch.equal(first, weights(model))
    assert is_noisy != torch.equal(first, other)
    mean = weights(model)
    train(model, opt, problem, 1)
    assert is_noisy != torch.allclose(sampled(model, opt, 0) - weights(model), first - mean, rtol=1e-3, atol=1e-6)


@every_optimizer
def test_a_step_without_a_pass_and_a_pass_within_a_pass_are_refused(optimizer):
    _, opt = build(optimizer)
    with pytest.raises(NoMeasurementError, match=rf"^{optimizer.__name__}\.step\(\) was called without measured"):
        opt.step()
    with opt.sampled_params(), pytest.raises(UnsupportedTrainingError, match="cannot be nested"), opt.sampled_params():
        pass


@every_step
def test_frozen_parameters_stay(optimizer, step_rule, problem):
    model, opt = build(optimizer, step_rule)
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    if optimizer.joins_weights:
        with pytest.raises(UnsupportedTrainingError, match=r"joins all weights .* 0\.weight, 0\.bias"):
            train(model, opt, problem, 1)
    else:
        train(model, opt, problem, 3)
    assert torch.equal(model[0].weight, frozen)


@every_step
def test_both_engines_take_the_same_step(optimizer, step_rule, problem):
    if not chooses_engine(optimizer):
        pytest.skip("it has one engine")
    runs = []
    for engine in ("fused", "backpack"):
        model, opt = build(optimizer, step_rule, engine=engine)
        train(model, opt, problem, 3)
        # The gradient of a bias before BatchNorm is rounding, which Adam scales to whole steps.
        runs.append({name: param.detach() for name, param in model.named_parameters() if name != "0.bias"})
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-5)
