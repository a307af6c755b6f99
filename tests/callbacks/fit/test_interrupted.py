"""After exceptions, Ctrl-C and non-finite batches, the weights are the posterior mean and all patches are undone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from tiny_training import Classifier, assert_same_bits, fit, flat_state, loader, mlp, quiet_trainer, weights
from torch import nn

from lightning_bayes import VOGNCallback
from lightning_bayes.optim.groups import state_of

NATURAL = {"lr": 0.05, "init_precision": 100.0}  # noise from the first pass on


class Breaks(Classifier):
    """Raises in the middle of a pass, where the weights are a sample."""

    def __init__(self, error=None, where="training_step") -> None:
        super().__init__()
        self.error, self.where = error, where

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.sampled = weights(self)
        self._break("training_step")
        if self.where == "backward":
            loss.register_hook(lambda grad: self._break("backward"))
        return loss

    def _break(self, where):
        if self.where == where and self.error is not None and self.training_steps == 5:
            raise self.error


class Means(Callback):
    """Keeps the weights at the start of the last batch: the mean."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.last = weights(pl_module)


@pytest.mark.usefixtures("_sigint")
@pytest.mark.parametrize("where", ["training_step", "backward"])
@pytest.mark.parametrize(
    ("error", "seen"), [(RuntimeError("out of memory"), RuntimeError), (KeyboardInterrupt(), SystemExit)], ids=repr
)
def test_interrupted_training_leaves_the_mean_and_no_patch(error, seen, where):
    module, callback, means = Breaks(error, where), VOGNCallback(mc_samples=2, **NATURAL), Means()
    trainer = quiet_trainer(callback, means)
    with pytest.raises(seen):
        trainer.fit(module, loader())
    assert module.training_steps == 5
    assert not torch.equal(module.sampled["net.0.weight"], means.last["net.0.weight"])
    assert_same_bits(weights(module), means.last)
    assert callback.optimizer.stashed_means() == {}

    module.error = None
    fit(module, callback)
    assert callback.optimizer.num_updates == 6
    assert not torch.equal(module.net[0].weight, means.last["net.0.weight"])


class Diverges(Classifier):
    """Has a non-finite loss in some calls; BatchNorm sees the bad batch too."""

    def __init__(self, bad, value=float("nan")) -> None:
        super().__init__(net=nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)))
        self.bad, self.value = bad, value

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.training_steps += 1
        if self.training_steps - 1 in self.bad:
            x = x * self.value
        return F.cross_entropy(self(x), y)


class States(Callback):
    """Everything that training changes, after each batch: weights, statistics and optimizer state."""

    def __init__(self) -> None:
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        (optimizer,) = trainer.optimizers
        state = {f"{i}.{k}": v for i, s in state_of(optimizer.state_dict()).items() for k, v in flat_state(s).items()}
        self.seen.append({**weights(pl_module), **{name: value.clone() for name, value in state.items()}})


SKIPPED = r"Update 3 has a non-finite gradient or curvature \(gradients of net\.0\.weight.*skipped.*\(1 in a row\)"


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_batch_that_is_not_finite_is_skipped_counted_and_warned_of(value):
    module, callback, states = Diverges({2}, value), VOGNCallback(), States()
    with pytest.warns(UserWarning, match=SKIPPED):
        trainer = fit(module, callback, states)
    assert_same_bits(states.seen[2], states.seen[1])
    assert not torch.equal(states.seen[3]["net.0.weight"], states.seen[2]["net.0.weight"])
    assert callback.optimizer.num_updates == 5
    assert trainer.callback_metrics["posterior/skipped_updates"] == 1
    assert all(tensor.isfinite().all() for tensor in weights(module).values())


@pytest.mark.filterwarnings("ignore:Update . has a non-finite gradient or curvature")
def test_one_bad_micro_batch_spoils_its_window_only():
    module, callback = Diverges({1}), VOGNCallback(mc_samples=1)
    fit(module, callback, accumulate_grad_batches=2)
    assert (callback.optimizer.num_updates, callback.optimizer.skipped_steps) == (2, 1)
    assert all(tensor.isfinite().all() for tensor in weights(module).values())


@pytest.mark.filterwarnings("ignore:Update . has a non-finite gradient or curvature")
def test_bad_updates_with_good_ones_between_are_no_error():
    callback = VOGNCallback(max_nonfinite_steps=2)
    fit(Diverges({0, 2, 4}), callback)
    assert (callback.optimizer.num_updates, callback.optimizer.skipped_steps) == (3, 3)


class Constant(Classifier):
    """A loss that is not finite although its gradient is."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + float("inf") if batch_idx == 2 else loss


def test_loss_that_is_not_finite_is_skipped_even_with_finite_gradients():
    callback = VOGNCallback()
    with pytest.warns(UserWarning, match=r"Update 3 has a"):
        fit(Constant(net=mlp()), callback)
    assert (callback.optimizer.num_updates, callback.optimizer.skipped_steps) == (5, 1)
