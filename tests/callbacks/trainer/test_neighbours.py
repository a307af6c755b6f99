"""Lightning's own callbacks and the trainer's flags together with `VOGNCallback`."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from tiny_training import (
    EXAMPLES,
    Classifier,
    LearningRates,
    ValidatedClassifier,
    assert_same_bits,
    fit,
    loader,
    quiet_trainer,
    weights,
)
from torch import nn

from lightning_bayes import VOGNCallback
from lightning_bayes.optim.effective import effective

BAREBONES = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "log_every_n_steps", "logger")


class Tunable(Classifier):
    """Has the attributes that Lightning's tuners set."""

    def __init__(self) -> None:
        super().__init__(lambda m: torch.optim.Adam(m.parameters(), lr=m.lr, weight_decay=0.01))
        self.lr, self.batch_size = 1e-3, 4

    def train_dataloader(self):
        return loader(self.batch_size)


def assert_prepared(callback):
    """The optimizer's N, and the prior from its penalty, belong to the real training."""
    (group,) = callback.optimizer.param_groups
    assert (group["posterior"]["num_data"], effective(group).prior_precision) == (
        EXAMPLES,
        pytest.approx(0.01 * EXAMPLES),
    )


def rates_of_plain_lightning(folder):
    """Rates and length of a plain run: Lightning 2.5.0 drops the found rate, and an epoch, for any optimizer."""
    module, rates = Tunable(), LearningRates()
    quiet_trainer(LearningRateFinder(num_training_steps=20), rates, default_root_dir=folder, max_epochs=4).fit(module)
    return rates.seen[0] == [module.lr], len(rates.seen)


@pytest.mark.parametrize("first", [True, False], ids=["before_ours", "after_ours"])
def test_learning_rate_finder_suggests_a_rate_for_the_noisy_optimizer(first, tmp_path):
    ours, theirs, rates = VOGNCallback(), LearningRateFinder(num_training_steps=20), LearningRates()
    callbacks = [theirs, ours, rates] if first else [ours, theirs, rates]
    module = Tunable()
    trainer = quiet_trainer(*callbacks, default_root_dir=tmp_path, max_epochs=4)
    trainer.fit(module)
    assert module.lr != 1e-3
    is_used, length = rates_of_plain_lightning(tmp_path)
    assert rates.seen == [[module.lr if is_used else 1e-3]] * length
    assert ours.optimizer.num_updates == length
    assert_prepared(ours)


def test_tuner_leaves_weights_and_noise_as_a_fresh_run_finds_them(tmp_path):
    """lr_find restores everything, so training afterwards equals training with the found rate from the start."""
    module, callback = Tunable(), VOGNCallback()
    trainer = quiet_trainer(callback, default_root_dir=tmp_path, max_epochs=2)
    start = weights(module)
    Tuner(trainer).lr_find(module, num_training=20)
    assert module.lr != 1e-3
    assert_same_bits(weights(module), start)
    trainer.fit(module)
    fresh = Tunable()
    fresh.load_state_dict(start)
    fresh.lr = module.lr
    quiet_trainer(VOGNCallback(), max_epochs=2).fit(fresh)
    assert_same_bits(weights(module), weights(fresh))


def test_batch_size_finder_does_not_change_num_data(tmp_path):
    module, callback = Tunable(), VOGNCallback()
    finder = BatchSizeFinder(mode="power", steps_per_trial=1, init_val=4, max_trials=2)
    quiet_trainer(callback, finder, default_root_dir=tmp_path).fit(module)
    assert module.batch_size > 4
    assert callback.optimizer.num_updates == -(-EXAMPLES // module.batch_size)
    assert_prepared(callback)


def test_gradient_accumulation_scheduler_changes_the_number_of_updates():
    callback = VOGNCallback(mc_samples=2)
    trainer = fit(Classifier(), callback, GradientAccumulationScheduler({0: 1, 1: 3}), max_epochs=2)
    assert callback.optimizer.num_updates == trainer.global_step == 6 + 2


def test_stochastic_weight_averaging_averages_means_and_recomputes_statistics_without_noise():
    """The mean over epoch starts and the BatchNorm statistics of one more epoch, computed by hand."""
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    module, callback, snapshots = Classifier(net=net), VOGNCallback(mc_samples=2), []

    class EpochStarts(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if 1 <= trainer.current_epoch <= 3:
                snapshots.append(weights(pl_module))

    fit(module, callback, EpochStarts(), StochasticWeightAveraging(1e-2, swa_epoch_start=2), max_epochs=4)
    assert callback.optimizer.num_updates == 4 * 6
    for name, param in module.named_parameters():
        torch.testing.assert_close(param.detach(), torch.stack([s[name] for s in snapshots]).mean(0))
    with torch.no_grad():
        batch_means = torch.stack([net[0](x).mean(0) for x, _ in loader()])
    torch.testing.assert_close(net[1].running_mean, batch_means.mean(0))


@pytest.mark.skipif(not hasattr(lightning_callbacks, "WeightAveraging"), reason="came with Lightning 2.6")
def test_weight_averaging_averages_posterior_means():
    """Two snapshots of the mean, averaged by hand."""
    module, snapshots = Classifier(), []

    class Snapshots(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            snapshots.append(weights(pl_module))

    quiet_trainer(VOGNCallback(), Snapshots(), lightning_callbacks.WeightAveraging(), max_epochs=1).fit(
        module, loader()
    )
    for name, value in weights(module).items():
        torch.testing.assert_close(value, torch.stack([s[name] for s in snapshots]).mean(0))


def test_fit_twice_starts_a_new_posterior_at_the_learned_weights():
    module, callback = Classifier(), VOGNCallback()
    fit(module, callback)
    first = callback.optimizer
    fit(module, callback)
    assert callback.optimizer is not first
    assert callback.optimizer.num_updates == 6


@pytest.mark.parametrize(
    ("flags", "updates"),
    [
        ({"fast_dev_run": True}, 1),
        ({"barebones": True, **dict.fromkeys(BAREBONES)}, 6),
        ({"max_epochs": None, "max_steps": 4}, 4),
        ({"max_epochs": 2, "limit_val_batches": 0}, 12),
        ({"num_sanity_val_steps": 2}, 6),
        ({"detect_anomaly": True}, 6),
        ({"inference_mode": False}, 6),
    ],
    ids=["fast_dev_run", "barebones", "max_steps", "no_validation", "sanity", "anomaly", "no_inference_mode"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*barebones=True")  # Lightning lists what it switches off
def test_trainer_flags_keep_their_meaning(flags, updates):
    module, callback = ValidatedClassifier(), VOGNCallback()
    trainer = quiet_trainer(callback, **flags)
    trainer.fit(module, loader(), loader())
    assert callback.optimizer.num_updates == trainer.global_step == updates
    assert module.training_steps == updates
