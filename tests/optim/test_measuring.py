"""When updates measure, and what a measurement then weighs, against averages written out by hand."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim import BBB, IVON, KFAC, VOGN, MomentumVON, NoisyAdam, VadaGrad, Vadam, Vprop
from lightning_bayes.optim.finished_pass import BarePass
from lightning_bayes.optim.measuring import FIRST_UPDATES, elapsed_updates, updates_covered, weight_of_old

F64 = torch.float64


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, 3, generator=generator, dtype=F64)
    return list(zip(x, torch.randint(2, (count, 6), generator=generator), strict=True))


def vogn(model, interval, *, eps=1e-8, **arguments):
    base = torch.optim.Adam(model.parameters(), lr=0.01, eps=eps)
    return VOGN(model, base=base, num_data=50, curvature_interval=interval, **{"betas": (0.9, 0.95), **arguments})


def run(opt, model, data, loss=F.cross_entropy, look=lambda: None):
    found = []
    for x, y in data:

        def closure(x=x, y=y):
            opt.zero_grad()
            look()
            value = loss(model(x), y)
            value.backward()
            return value

        opt.step(closure)
        found.append(opt.state[model[0].weight]["curvature"].clone())
    return found


def is_bare(model):
    hooks = [*model.modules()]
    return not any(m._forward_pre_hooks or m._forward_hooks or m._backward_hooks or "forward" in vars(m) for m in hooks)


@pytest.mark.parametrize("interval", [1, 3, 10])
def test_measurements_cover_every_update_once(interval):
    elapsed = [elapsed_updates(number, number, interval) for number in range(1, 41)]
    assert elapsed[:FIRST_UPDATES] == [1] * FIRST_UPDATES
    covered = 0
    for number, count in enumerate(elapsed, 1):
        covered += count
        assert updates_covered(number, number, interval) == covered


@pytest.mark.parametrize(("measurements", "weight"), [(1, 0.0), (2, 0.5), (4, 0.75), (1000, 0.9)])
def test_an_average_starts_as_a_running_mean_unless_it_is_the_papers(measurements, weight):
    assert weight_of_old(0.9, measurements, 1, starts_as_mean=True) == weight
    assert weight_of_old(0.9, measurements, 1, starts_as_mean=False) == 0.9


def test_an_average_with_pauses_is_that_of_measurements_held_until_the_next(generator):
    """Oracle: the running mean, then average, of every update, in which an update without measurement repeats the next."""
    model, beta, interval = network(), 0.95, 4
    measured = []
    opt = vogn(model, interval, init_precision=None)
    update_all = opt._update_all

    def recorded(measurement):
        measured.append(measurement.curvature.get(model[0].weight, None))
        measured[-1] = None if measured[-1] is None else measured[-1].clone()
        update_all(measurement)

    opt._update_all = recorded
    found = run(opt, model, batches(30))
    held = torch.zeros_like(found[0])
    for number in range(1, len(found) + 1):
        if elapsed_updates(number, number, interval):
            for t in range(number - elapsed_updates(number, number, interval) + 1, number + 1):
                weight = min(beta, (t - 1) / t)
                held = weight * held + (1 - weight) * measured[number - 1]
        else:
            assert measured[number - 1] is None
        torch.testing.assert_close(found[number - 1], held, rtol=1e-12, atol=0)


def test_the_papers_step_weights_the_old_by_a_power_of_beta(generator):
    model, interval = network(), 5
    opt = VOGN(model, lr=0.01, num_data=50, init_precision=20.0, betas=(0.9, 0.9), curvature_interval=interval)
    seen = []
    update_all = opt._update_all
    opt._update_all = lambda measurement: (
        seen.append(copy.deepcopy(dict(measurement.curvature))),
        update_all(measurement),
    )
    s = [torch.full_like(model[0].weight, (20.0 - 1.0) / 50), *run(opt, model, batches(16))]
    for number in range(1, 17):
        measurement = list(seen[number - 1].values())
        if number <= 10 or number == 15:
            power = 0.9 if number <= 10 else 0.9**5
            expected = power * s[number - 1] + (1 - power) * measurement[0]
            torch.testing.assert_close(s[number], expected, rtol=1e-12, atol=0)
        else:
            assert not measurement
            assert torch.equal(s[number], s[number - 1])


def test_every_tenth_update_measures_if_another_optimizer_moves_the_mean():
    runs = []
    for arguments in ({}, {"curvature_interval": 10}):
        model = network()
        opt = VOGN(model, base=torch.optim.SGD(model.parameters(), lr=0.1), num_data=50, **arguments)
        runs.append(run(opt, model, batches(13)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_pass_without_measurement_runs_the_bare_model():
    model, bare, modes = network(), [], []
    opt = vogn(model, 10)

    def look():
        bare.append(is_bare(model))
        modes.append(torch.overrides._get_current_function_mode_stack())

    run(opt, model, batches(21), look=look)
    assert bare == [False] * 10 + [True] * 9 + [False, True]
    assert not any(modes[10:19])


def test_gradients_are_those_of_a_pass_that_measures():
    """The same update, from the same state, with and without a measurement: the means move alike, bit for bit."""
    model = network()
    opt = vogn(model, 10)
    run(opt, model, batches(12))
    twin = network()
    twin.load_state_dict(model.state_dict())
    other = vogn(twin, 10)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    ((x, y),) = batches(1, seed=3)
    for each, its, always in ((opt, model, False), (other, twin, True)):
        with each.measured_pass(always_measures=always, watch_backward=True):
            F.cross_entropy(its(x), y).backward()
        each.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.equal(opt.state[model[0].weight]["curvature"], other.state[twin[0].weight]["curvature"])


@pytest.mark.parametrize("at", [13, 19, 20])
def test_a_run_resumed_in_the_middle_of_an_interval_goes_on_bit_by_bit(at):
    data = batches(24)
    model = network()
    opt = vogn(model, 10)
    run(opt, model, data[:at])
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    rest = run(opt, model, data[at:])
    resumed = network()
    resumed.load_state_dict(saved[0])
    other = vogn(resumed, 1)  # the checkpoint's interval counts
    other.load_state_dict(saved[1])
    again = run(other, resumed, data[at:])
    assert all(torch.equal(a, b) for a, b in zip(rest, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_micro_batches_whose_losses_are_divided_are_one_batch_without_a_measurement():
    """Two passes of 3 examples, opened one by one, against one of 6."""
    means = []
    for sizes in ([6], [3, 3]):
        model = network()
        opt = vogn(model, 10)
        for x, y in batches(14):
            for part, labels in zip(x.split(sizes), y.split(sizes), strict=True):
                with opt.sampled_params(0):
                    (F.cross_entropy(model(part), labels) / len(sizes)).backward()
            opt.step()
            opt.zero_grad()
        means.append([param.detach().clone() for param in model.parameters()])
    torch.testing.assert_close(means[0], means[1], rtol=1e-10, atol=1e-12)


def test_a_sum_over_six_examples_is_six_times_the_mean_without_a_measurement_too():
    """Adam's step is the same for gradients and an ε that are six times as large."""
    means = []
    for reduction, eps in (("mean", 1e-8), ("sum", 6e-8)):
        model = network()
        opt = vogn(model, 10, eps=eps)
        run(opt, model, batches(14), lambda out, y, how=reduction: F.cross_entropy(out, y, reduction=how))
        means.append([param.detach().clone() for param in model.parameters()])
    torch.testing.assert_close(means[0], means[1], rtol=1e-10, atol=1e-12)


def test_samples_of_one_batch_weigh_alike_and_are_not_counted():
    model = network()
    opt = vogn(model, 10, mc_samples=3)
    run(opt, model, batches(10))
    grads, measurement = [], None
    (x, y) = batches(1, seed=5)[0]
    for sample in range(3):
        with opt.measured_pass(sample, is_only_batch=True) as captured:
            F.cross_entropy(model(x), y).backward()
            grads.append(model[0].weight.grad.clone())
        assert isinstance(captured, BarePass)
    tensors, _ = opt.collect()
    assert len(tensors) == 1 + len(list(model.parameters()))  # the loss and ĝ: no ĥ for the processes to add
    torch.testing.assert_close(model[0].weight.grad, torch.stack(grads).mean(0), rtol=1e-12, atol=1e-15)
    measurement = opt._measurement(fill=False)
    assert not measurement.curvature
    assert not measurement.is_counted


def test_a_layer_that_is_thawed_late_measures_its_first_ten_updates():
    model = network()
    model[0].requires_grad_(False)
    opt = VOGN(model, [*model.parameters()], lr=0.01, num_data=50, curvature_interval=10)
    data, counts = batches(40), []
    for number, (x, y) in enumerate(data, 1):
        if number == 14:
            model[0].requires_grad_(True)

        def closure(x=x, y=y):
            opt.zero_grad()
            counts.append(not is_bare(model))
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        before = {p: opt.state[p].get("curvature", torch.zeros(())).clone() for p in model.parameters()}
        opt.step(closure)
        changed = {p: not torch.equal(before[p], opt.state[p]["curvature"]) for p in model.parameters()}
        assert changed[model[2].weight] == (number <= 10 or number % 10 == 0)
        assert changed[model[0].weight] == (14 <= number <= 23 or (number > 23 and number % 10 == 0))
    assert [number for number, measured in enumerate(counts, 1) if measured] == [*range(1, 11), *range(14, 24), 30, 40]


def test_vadam_divides_by_the_weight_of_what_was_measured():
    """From s₀ = 0 and gradients of one size, ŝ is their square in every update."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    opt = Vadam(
        model, lr=0.0, num_data=10, prior_precision=5.0, init_precision=5.0, betas=(0.0, 0.9), curvature_interval=4
    )
    x = torch.ones(4, 1, dtype=F64)
    for number in range(1, 20):
        opt.step(lambda: _backward(2 * model(x).mean()))
        weight = 1 - 0.9 ** updates_covered(number, number, 4)
        assert opt.state[model.weight]["curvature"].item() / weight == pytest.approx(4)
    arguments = opt.update_arguments(opt.param_groups[0], 20)
    assert arguments["total_weight"] == pytest.approx(1 - 0.9 ** updates_covered(20, 20, 4))


def _backward(loss):
    loss.backward()
    return loss


@pytest.mark.parametrize("method", [NoisyAdam, Vprop, Vadam])
def test_squares_of_the_batchs_gradient_may_pause_too(method):
    model = network()
    opt = method(model, base=torch.optim.Adam(model.parameters(), 0.01), num_data=50, curvature_interval=10)
    found = run(opt, model, batches(21))
    changed = [number for number in range(2, 22) if not torch.equal(found[number - 1], found[number - 2])]
    assert changed == [*range(2, 11), 20]


@pytest.mark.parametrize("method", [IVON, BBB, VadaGrad, MomentumVON, KFAC])
def test_methods_that_need_every_measurement_refuse_an_interval(method):
    with pytest.raises(HyperparameterError, match=f"{method.__name__} does not support curvature_interval=10"):
        method(network(), num_data=50, curvature_interval=10)


@pytest.mark.parametrize("value", [0, 1.5, "often"])
def test_an_interval_is_a_whole_number(value):
    with pytest.raises(HyperparameterError, match=r"curvature_interval=.* must be a whole number of at least 1"):
        vogn(network(), value)


def test_a_skipped_update_is_measured_again():
    model = network()
    opt = vogn(model, 10)
    data = batches(21)
    run(opt, model, data[:19])
    x, y = data[19]
    with pytest.warns(UserWarning, match="non-finite"):
        run(opt, model, [(x * math.nan, y)])
    before = opt.state[model[0].weight]["curvature"].clone()
    run(opt, model, [(x, y)])
    assert opt.num_updates == 20
    assert not torch.equal(before, opt.state[model[0].weight]["curvature"])
