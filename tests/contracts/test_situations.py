"""Every noisy optimizer in the situations of real training: accumulation, scaled losses, groups, errors, two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from distributed import run_on_ranks
from optimizer_family import (
    OPTIMIZERS,
    construct,
    draws_labels,
    from_backpack,
    is_chain,
    is_reparameterised,
    step_rules,
    weights,
)
from torch import nn

from lightning_bayes.errors import PosteriorError, UnsupportedTrainingError
from lightning_bayes.strategies import all_reduce_mean_

CASES = [(cls, rule) for cls in OPTIMIZERS for rule in step_rules(cls) if rule != "user"]
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda cls: cls.__name__)


# Each pass samples its labels, so two passes of half a batch differ from one pass of the whole batch.
same_labels = pytest.mark.parametrize(
    "optimizer", [cls for cls in OPTIMIZERS if not draws_labels(cls)], ids=lambda cls: cls.__name__
)


def batch(rows=slice(None)):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    return x[rows], (x[rows, 0] > 0).long()


def build(optimizer, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    return model, construct(optimizer, model, num_data=1600, damping=1e-2, **arguments)


def loss_of(model, rows=slice(None)):
    x, y = batch(rows)
    return F.cross_entropy(model(x), y)


def backward(model, rows=slice(None)):
    loss_of(model, rows).backward()


def train(model, opt, passes, updates=3, divisor=1):
    """Run updates, each from passes (noise index, rows), whose losses are divided by a number."""
    for _ in range(updates):
        for sample, rows in passes:
            with opt.sampled_params(sample):
                loss = loss_of(model, rows)
                (loss if divisor == 1 else loss / divisor).backward()
        opt.step()
    return weights(model)


@same_labels
def test_micro_batches_under_one_noise_whose_losses_are_divided_are_one_large_batch(optimizer):
    # A first pass without noise only guesses the reparameterised Hessian, so the initial precision is set.
    start = {"init_precision": 20.0} if is_reparameterised(optimizer) else {}
    whole = train(*build(optimizer, **start), [(0, slice(None))])
    quarters = [(0, slice(first, first + 4)) for first in range(0, 16, 4)]
    if from_backpack(optimizer):
        with pytest.raises(
            UnsupportedTrainingError, match=r"BackPACK needs a loss .* unchanged, without other terms or"
        ):
            train(*build(optimizer, **start), quarters, divisor=4)
        return
    parts = train(*build(optimizer, **start), quarters, divisor=4)
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-11)


@each_optimizer
def test_gradients_of_passes_add_up(optimizer):
    model, opt = build(optimizer, mc_samples=1)
    grads = []
    for _ in range(2):
        with opt.sampled_params(0):
            backward(model)
        grads.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
    torch.testing.assert_close(
        grads[1], 2 * grads[0], rtol=1e-6, atol=1e-4
    )  # the prior's part at the sample is averaged


@each_optimizer
def test_grad_scaler_changes_nothing_or_is_refused_by_name(optimizer):
    model, opt = build(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    if from_backpack(optimizer):
        message = (
            rf"^{optimizer.__name__} measures .* no scaled loss.* torch\.amp\.GradScaler or of precision='16-mixed'"
        )
        with (
            pytest.raises(UnsupportedTrainingError, match=message),
            opt.sampled_params(0, loss_scale=scaler.get_scale()),
        ):
            pass
        return
    for _ in range(3):
        with opt.sampled_params(0, loss_scale=scaler.get_scale()):
            scaler.scale(loss_of(model)).backward()
        scaler.step(opt)
        scaler.update()
    torch.testing.assert_close(weights(model), train(*build(optimizer), [(0, slice(None))]), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("optimizer", "step_rule"), CASES, ids=[f"{c.__name__}-{r}" for c, r in CASES])
def test_groups_have_learning_rates_of_their_own(optimizer, step_rule):
    model, opt = build(optimizer)
    if optimizer.joins_weights:
        with pytest.raises(UnsupportedTrainingError, match=r"joins all weights .*, so it has one parameter group"):
            opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        return
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    opt = construct(optimizer, model, groups, num_data=1600, step_rule=step_rule)
    before = weights(model[0]), weights(model[2])
    train(model, opt, [(0, slice(None))])
    assert torch.equal(weights(model[0]), before[0])
    assert not torch.equal(weights(model[2]), before[1])


@each_optimizer
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_inside_a_pass_leaves_the_mean(optimizer, error):
    model, opt = build(optimizer)
    before = train(model, opt, [(0, slice(None))])
    grads = {param: torch.full_like(param, 7.0) for param in model.parameters()}
    for param, grad in grads.items():
        param.grad = grad

    def broken_pass():
        with opt.sampled_params():
            backward(model)
            raise error

    with pytest.raises(error):
        broken_pass()
    assert torch.equal(weights(model), before)
    assert all(param.grad is grad and (grad == 7).all() for param, grad in grads.items())
    opt.zero_grad()
    assert train(model, opt, [(0, slice(None))]).isfinite().all()  # the optimizer still works


@each_optimizer
def test_unused_parameters_are_no_obstacle(optimizer):
    model = WithUnused(build(optimizer)[0])
    if is_chain(optimizer):
        with pytest.raises(PosteriorError, match=r"chain of nn\.Linear layers, but .* has unused \(3 inputs after"):
            construct(optimizer, model, num_data=1600)
        return
    opt = construct(optimizer, model, num_data=1600)
    before = weights(model.used)
    train(model, opt, [(0, slice(None))])
    assert weights(model).isfinite().all()
    assert not torch.equal(weights(model.used), before)


class WithUnused(nn.Module):
    def __init__(self, used):
        super().__init__()
        self.used, self.unused = used, nn.Linear(3, 3).double()

    def forward(self, x):
        return self.used(x)


SHARDS = (slice(0, 4), slice(4, 16))


def train_on_rank(rank):
    trained = {}
    for optimizer in OPTIMIZERS:
        model, opt = build(optimizer)
        for _ in range(3):
            with opt.sampled_params(rank):
                backward(model, SHARDS[rank])
            all_reduce_mean_(*opt.collect())
            opt.step()
        trained[optimizer.__name__] = weights(model)
    return trained


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(train_on_rank, 2, tmp_path_factory.mktemp("family"))


@pytest.mark.ddp
@same_labels
def test_two_ranks_are_one_process_with_two_weight_samples(optimizer, ranks):
    """Batches of 4 and of 12 examples; both ranks are bitwise equal."""
    first, second = (rank[optimizer.__name__] for rank in ranks)
    assert torch.equal(first, second)
    model, opt = build(optimizer)
    for _ in range(3):
        for sample, rows in enumerate(SHARDS):
            share = (rows.stop - rows.start) / 16
            with opt.measured_pass(sample, watch_backward=True, share=share):
                backward(model, rows)
        opt.step()
    torch.testing.assert_close(first, weights(model), rtol=1e-9, atol=1e-11)
