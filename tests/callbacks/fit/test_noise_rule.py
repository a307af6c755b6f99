"""The default noise of classifiers with normalisation layers follows the fit."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_training import ValidatedClassifier, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import VOGNCallback
from lightning_bayes.callbacks.fit.noise_rule import NoiseRule
from lightning_bayes.optim.default_noise import MOST_NOISE_OF_NORMALISED, NOISE_OF_NORMALISED


def normalised(lr=0.03):
    """One hidden layer with BatchNorm."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    return ValidatedClassifier(lambda m: torch.optim.Adam(m.parameters(), lr=lr), net)


class Resumable(DataLoader):
    """A loader that goes on with the next batch of a resumed epoch."""

    def __iter__(self):
        start, self.start = getattr(self, "start", 0), 0
        for index, batch in enumerate(super().__iter__()):
            self.position = index + 1
            if index >= start:
                yield batch

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]


def loader(seed, size=64, batch=16):
    """Inputs with labels that do not depend on them."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(size, 8, generator=generator), torch.randint(4, (size,), generator=generator)
    return Resumable(TensorDataset(x, y), batch_size=batch)


def fit(module, *callbacks, epochs=12, validation=True, resume=None, **options):
    """The callback after a fit."""
    callback = VOGNCallback()
    options |= {} if validation else {"limit_val_batches": 0}
    options |= {"max_epochs": epochs, "enable_checkpointing": bool(callbacks)}
    quiet_trainer(callback, *callbacks, **options).fit(module, loader(1), loader(2), ckpt_path=resume)
    return callback


def kappa(callback):
    (group,) = callback.optimizer.param_groups
    return group["posterior"]["relative_noise"]


def shares(epochs):
    """κ / κ₁ after epochs of one batch each, from pairs of training loss and validation NLL; the first losses are 2."""
    rule = NoiseRule()
    for _ in range(5):
        rule.add({"loss": torch.tensor(2.0)})
    for loss, validation in [(2.0, math.inf), *epochs]:
        rule.add({"loss": torch.tensor(loss)})
        rule.add_validation(validation)
        rule.start_epoch(lambda total: total)
    return rule.path[1:]


def test_a_loss_below_four_fifths_of_the_smallest_validation_nll_counts_as_memorised():
    assert shares([(1.5, 1.2), (0.9, 5.0), (0.3, 1.5)]) == pytest.approx([0, 0.06 / 4, 0.06 / 8 + 0.66 / 4])


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_an_epoch_that_is_not_finite_leaves_the_noise(loss):
    assert shares([(0.3, 1.2), (loss, 1.2)]) == pytest.approx([0.66 / 4, 0.66 / 4])


def test_losses_of_processes_are_added():
    rule = NoiseRule()
    rule.add({"loss": torch.tensor(0.5)})
    rule.add_validation(1.0)
    rule.start_epoch(lambda total: total + torch.tensor([0.1, 1.0, 0.1, 1.0]))
    assert rule.share == pytest.approx((0.8 - 0.3) / 0.5 / 2)


def test_a_network_that_memorises_gets_noise():
    callback = fit(normalised(), epochs=30)
    assert kappa(callback) == pytest.approx(MOST_NOISE_OF_NORMALISED * callback._rule.share)
    assert kappa(callback) > 0.1


def test_without_validation_data_the_noise_stays():
    assert kappa(fit(normalised(), epochs=30, validation=False)) == NOISE_OF_NORMALISED


def test_a_network_that_underfits_gets_the_least():
    assert kappa(fit(normalised(lr=1e-4), epochs=3)) == NOISE_OF_NORMALISED


def test_a_stated_scale_stays():
    callback = VOGNCallback(relative_noise=0.2)
    quiet_trainer(callback, max_epochs=12).fit(normalised(), loader(1), loader(2))
    assert kappa(callback) == 0.2


def test_accumulated_batches_count_whole():
    once, twice = (fit(normalised(lr=0.0), epochs=2, accumulate_grad_batches=count) for count in (1, 2))
    assert kappa(once) == pytest.approx(kappa(twice), rel=0.05)


@pytest.mark.parametrize(
    "when",
    [{"every_n_train_steps": 26}, {"every_n_epochs": 6}, {"every_n_epochs": 6, "save_on_train_epoch_end": True}],
    ids=["within an epoch", "after validation", "after an epoch"],
)
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_fit_ends_with_the_same_bits(when, tmp_path):
    whole, resumed = normalised(), normalised()
    first, again = (ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **when) for _ in "ab")
    callback = fit(whole, first)
    path = min(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    second = fit(resumed, again, resume=path)
    assert kappa(callback) == kappa(second) > 0.1
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    )


def test_the_lines_of_a_fit_say_what_the_noise_did(caplog):
    with caplog.at_level("INFO"):
        callback = fit(normalised(), epochs=30)
    assert "it grows after epochs whose training loss is below the validation NLL" in caplog.text
    assert f"to {kappa(callback):.2g}" in caplog.text or f"at {kappa(callback):.2g}" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        fit(normalised(lr=1e-4), epochs=3)
    assert "κ stayed at 0.005, as the losses told" in caplog.text
