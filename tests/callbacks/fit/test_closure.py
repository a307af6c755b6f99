"""The Monte-Carlo closure: K passes per batch, one update; accumulation, clipping and precision keep their meaning."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.utilities.rank_zero import WarningCache
from tiny_training import EXAMPLES, Classifier, assert_close, assert_same_bits, blobs, fit, loader, mlp, weights
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_bayes import VOGN, VOGNCallback

# The paper's step, with noise from the first pass on.
NATURAL = {"lr": 0.05, "init_precision": 100.0, "betas": (0.9, 0.99)}


def state(callback, key):
    names = {param: name for name, param in callback.optimizer.model.named_parameters()}
    return {names[param]: values[key] for param, values in callback.optimizer.state.items()}


class Counts(Callback):
    def __init__(self) -> None:
        self.steps = self.backwards = 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps += 1

    def on_after_backward(self, trainer, pl_module):
        self.backwards += 1


@pytest.mark.parametrize("mc_samples", [1, 3])
@pytest.mark.parametrize(("accumulate", "updates"), [(1, 6), (4, 2)])
def test_each_batch_runs_k_passes_and_each_window_one_update(mc_samples, accumulate, updates):
    module, callback, counts = Classifier(), VOGNCallback(mc_samples=mc_samples), Counts()
    trainer = fit(module, callback, counts, accumulate_grad_batches=accumulate)
    assert module.training_steps == counts.backwards == 6 * mc_samples
    assert counts.steps == trainer.global_step == callback.optimizer.num_updates == updates


@pytest.mark.parametrize("mc_samples", [1, 2])
@pytest.mark.parametrize("options", [NATURAL, {}], ids=["natural", "default"])
def test_accumulation_equals_one_large_batch(mc_samples, options):
    """Four batches of 4 equal one of 16."""
    results, examples = [], EXAMPLES
    for batch_size, accumulate in ((16, 1), (4, 4)):
        module, callback = Classifier(), VOGNCallback(mc_samples=mc_samples, num_data=examples, **options)
        data = loader(batch_size, examples)
        fit(module, callback, data=data, accumulate_grad_batches=accumulate, max_epochs=3)
        assert callback.optimizer.num_updates == 9
        results.append((weights(module), state(callback, "curvature")))
    (large, large_curvature), (small, small_curvature) = results
    assert_close(small, large, rtol=1e-6, atol=1e-6)
    assert_close(small_curvature, large_curvature, rtol=1e-4, atol=1e-6)


def test_a_truncated_window_is_divided_as_in_plain_lightning():
    """With 38 examples, the last window holds a batch of 4 and one of 2, whose losses are divided by 4."""
    results = []
    for callbacks in ([], [VOGNCallback(relative_noise=1e-30)]):
        module = Classifier(lambda net: torch.optim.SGD(net.parameters(), lr=1e-3))
        fit(module, *callbacks, data=loader(4, 38), accumulate_grad_batches=4, max_epochs=3)
        results.append(weights(module))
    assert_close(*results, rtol=1e-6, atol=1e-7)


def plain_vogn(mc_samples, clip=None):
    """The same training without Lightning."""
    net = mlp()
    opt = VOGN(net, num_data=EXAMPLES, mc_samples=mc_samples, **NATURAL)
    for x, y in loader():
        opt.zero_grad()
        for sample in range(mc_samples):
            with opt.sampled_params(sample):
                F.cross_entropy(net(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        opt.step()
    return weights(net)


def test_k_samples_equal_plain_pytorch_with_a_closure():
    net = mlp()
    opt = VOGN(net, num_data=EXAMPLES, mc_samples=3, **NATURAL)
    for x, y in loader():

        def closure(x=x, y=y):
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        opt.step(closure)
    module = Classifier()
    fit(module, VOGNCallback(mc_samples=3, **NATURAL))
    assert_close(weights(module.net), weights(net), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_acts_on_the_averaged_gradient(algorithm):
    module, unclipped = Classifier(), Classifier()
    clip = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    largest = []

    class Largest(Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            if grads:
                flat = torch.cat([g.flatten() for g in grads])
                largest.append((flat.norm() if algorithm == "norm" else flat.abs().max()).item())

    fit(module, VOGNCallback(mc_samples=3, **NATURAL), Largest(), **clip)
    fit(unclipped, VOGNCallback(mc_samples=3, **NATURAL))
    assert largest == pytest.approx([0.05] * 5, rel=1e-4)
    assert not torch.allclose(module.net[0].weight, unclipped.net[0].weight, atol=1e-3)
    if algorithm == "norm":
        assert_close(weights(module.net), plain_vogn(3, clip=0.05), rtol=1e-5, atol=1e-6)


def test_the_reported_loss_is_the_mean_over_samples():
    losses, reported = [], []

    class Keep(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            losses.append(loss.item())
            return loss

    class Report(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            reported.append(outputs["loss"].item())

    fit(Keep(), VOGNCallback(mc_samples=3, **NATURAL), Report())
    assert reported == pytest.approx([sum(losses[i : i + 3]) / 3 for i in range(0, 18, 3)])


class Returning(Classifier):
    """Returns None in some calls."""

    def __init__(self, *nothing_at: int) -> None:
        super().__init__()
        self.nothing_at = nothing_at

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if self.training_steps - 1 in self.nothing_at else loss


def rows(*batches: int) -> DataLoader:
    """The given batches of `loader()`."""
    return DataLoader(Subset(blobs(), [8 * batch + row for batch in batches for row in range(8)]), batch_size=8)


returns_none = pytest.mark.filterwarnings("ignore:.*training_step. returned .None.")  # Lightning's word on it


@returns_none
@pytest.mark.parametrize("mc_samples", [1, 3])
def test_batch_whose_training_step_returns_none_is_no_update(mc_samples):
    calls = range(mc_samples, 2 * mc_samples)
    module, callback = Returning(*calls), VOGNCallback(mc_samples=mc_samples, num_data=EXAMPLES)
    trainer = fit(module, callback)
    assert (trainer.global_step, callback.optimizer.num_updates, callback.optimizer.skipped_steps) == (6, 5, 0)
    expected = Classifier()
    fit(expected, VOGNCallback(mc_samples=mc_samples, num_data=EXAMPLES), data=rows(0, 2, 3, 4, 5))
    assert_same_bits(weights(module), weights(expected))


def test_training_step_that_returns_none_is_pointed_out(monkeypatch):
    monkeypatch.setattr(Closure, "warning_cache", WarningCache())  # Lightning warns once per process
    with pytest.warns(UserWarning, match="training_step` returned `None`"):
        fit(Returning(1), VOGNCallback())


@returns_none
@pytest.mark.parametrize("nothing_at", [0, 2], ids=["first", "last"])
def test_micro_batch_that_returns_none_is_left_out_of_its_window(nothing_at):
    module, options = Returning(nothing_at), {"num_data": EXAMPLES, **NATURAL}
    fit(module, VOGNCallback(**options), accumulate_grad_batches=3, data=rows(0, 1, 2))
    expected = Classifier()
    opt = VOGN(expected.net, **options)
    for x, y in rows(*(batch for batch in (0, 1, 2) if batch != nothing_at)):
        with opt.measured_pass(0, watch_backward=True, share=1 / 3):  # the loss is divided by 3, as in plain Lightning
            F.cross_entropy(expected(x), y).backward()
    opt.step()
    assert_close(weights(module), weights(expected), rtol=1e-6, atol=1e-7)


@returns_none
def test_sample_that_returns_none_is_left_out_of_the_mean():
    """The average over samples 0 and 2 of three, in plain PyTorch."""
    net = mlp()
    opt = VOGN(net, num_data=EXAMPLES, mc_samples=3, **NATURAL)
    for x, y in rows(0):
        for sample in (0, 2):
            with opt.sampled_params(sample):
                F.cross_entropy(net(x), y).backward()
        opt.step()
    module = Returning(1)
    fit(module, VOGNCallback(mc_samples=3, num_data=EXAMPLES, **NATURAL), data=rows(0))
    assert_close(weights(module.net), weights(net), rtol=1e-6, atol=1e-7)


class Dropping(Classifier):
    """The data order, training and callbacks draw from the global generator."""

    def __init__(self) -> None:
        super().__init__(net=nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 3)))
        self.masks: list[torch.Tensor] = []
        self.net[1].register_forward_hook(lambda m, x, out: self.masks.append(out.detach() == 0))

    def training_step(self, batch, batch_idx):
        self.order = [*getattr(self, "order", []), batch[1].tolist()]
        return super().training_step(batch, batch_idx)


def test_noise_does_not_touch_the_global_generator():
    runs = []
    for callbacks in ([], [VOGNCallback()], [VOGNCallback(seed=1)]):
        torch.manual_seed(3)
        module = Dropping()
        fit(module, *callbacks, data=loader(shuffle=True), max_epochs=2)
        runs.append((module.order, torch.stack(module.masks), torch.get_rng_state()))
    (order, masks, rng), *others = runs
    for their_order, their_masks, their_rng in others:
        assert their_order == order
        assert torch.equal(their_masks, masks)
        assert torch.equal(their_rng, rng)


def test_the_data_are_learned_from_a_sum_as_from_a_mean():
    """reduction="sum" is recognised: the same posterior as with the mean, although Lightning divides the loss."""
    results = []
    for module in (Classifier(), Classifier(loss=nn.CrossEntropyLoss(reduction="sum"))):
        fit(module, VOGNCallback(**NATURAL), accumulate_grad_batches=2)
        results.append(weights(module))
    assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
