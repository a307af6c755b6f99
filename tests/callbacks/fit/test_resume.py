"""What a checkpoint holds, what a resumed run keeps, and that it loads without the plugin; tests/faults kills runs."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_training import Classifier, assert_same_bits, loader, mlp, quiet_trainer, weights

from lightning_bayes import VOGNCallback, load_posterior


def environment():
    root = str(Path(__file__).parents[3])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


def trained(tmp_path, callback=None, name="last.ckpt", **options):
    module = Classifier()
    trainer = quiet_trainer(callback or VOGNCallback(lr=0.01, num_data=48), max_epochs=2, **options)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / name)
    return module, tmp_path / name


WITHOUT_PLUGIN = """
import sys
sys.modules["lightning_bayes"] = None  # importing it now raises ImportError
import torch, torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

checkpoint = torch.load(sys.argv[1], weights_only=True)
by_hand = Net()
by_hand.load_state_dict(checkpoint["state_dict"])
by_lightning = Net.load_from_checkpoint(sys.argv[1])
assert not any(name.startswith("lightning_bayes.") for name in sys.modules)
torch.save([by_hand.state_dict(), by_lightning.state_dict()], sys.argv[2])
"""


def test_a_checkpoint_loads_without_the_plugin_at_the_posterior_mean(tmp_path):
    _, path = trained(tmp_path)
    mean = load_posterior(path).mean
    command = [sys.executable, "-c", WITHOUT_PLUGIN, str(path), str(tmp_path / "found.pt")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for found in torch.load(tmp_path / "found.pt", weights_only=True):
        assert_same_bits(found, mean)


class SavesWithinAStep(Classifier):
    """Saves while the weights are a sample, as a cluster's signal handler does."""

    def __init__(self, path):
        super().__init__()
        self.path, self.offsets = path, []

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 3:
            mean = self.trainer.optimizers[0].stashed_means()
            self.mean = {n: mean[p].clone() for n, p in self.named_parameters()}
            self.offset = max(float((p.detach() - self.mean[n]).abs().max()) for n, p in self.named_parameters())
            self.trainer.save_checkpoint(self.path)
        return super().training_step(batch, batch_idx)


def test_a_save_from_within_a_training_step_writes_the_mean(tmp_path):
    module = SavesWithinAStep(tmp_path / "inside.ckpt")
    quiet_trainer(VOGNCallback(lr=0.01, init_precision=100.0)).fit(module, loader())
    assert module.offset > 0.05  # the weights were far from the mean
    assert_same_bits(torch.load(module.path, weights_only=True)["state_dict"], module.mean)
    assert_same_bits(load_posterior(module.path).mean, module.mean)


def resume_warnings(callback, path, data=None, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(callback, max_epochs=3, **options).fit(Classifier(), data or loader(), ckpt_path=path)
    return [str(w.message) for w in caught if "resumed run" in str(w.message)]


def test_a_resumed_run_with_the_same_arguments_says_nothing(tmp_path):
    _, path = trained(tmp_path)
    assert resume_warnings(VOGNCallback(lr=0.01), path) == []


def test_changed_hyperparameters_are_named_and_the_checkpoints_kept(tmp_path):
    _, path = trained(tmp_path, VOGNCallback(lr=0.01, prior_precision=2.0))
    callback = VOGNCallback(lr=0.05, betas=(0.8, 0.99), kl_weight=0.5, prior_precision=3.0, seed=4)
    (message,) = resume_warnings(callback, path)
    for part in (
        r"keeps the checkpoint's",
        "lr=0.01 (now 0.05)",
        "betas=(0.9, 0.999) (now (0.8, 0.99))",
        "kl_weight=1.0 (now 0.5)",
        "prior_precision=2.0 (now 3.0)",
        "noise_seed=0 (now 4)",
    ):
        assert part in message
    kept = callback.optimizer.param_groups[0]["posterior"]
    assert (kept["betas"], kept["kl_weight"], kept["prior_precision"], kept["noise_seed"]) == (
        (0.9, 0.999),
        1.0,
        2.0,
        0,
    )


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.parametrize("arguments", [{}, {"lr": 0.01}], ids=["default step", "natural step"])
def test_a_run_continues_without_the_callback_as_plain_training(arguments, tmp_path):
    """The user's optimizer finds its own state where it looks for it: moments of the default step, none of a natural one."""
    _, path = trained(tmp_path, VOGNCallback(**arguments))
    saved = torch.load(path, weights_only=True)["optimizer_states"][0]
    module = Classifier()
    trainer = quiet_trainer(max_epochs=3)
    trainer.fit(module, loader(), ckpt_path=path)
    (adamw,) = trainer.optimizers
    steps = {int(state["step"]) for state in adamw.state.values()}
    assert steps == {6 + (12 if not arguments else 0)}
    assert ("exp_avg" in saved["state"].get(0, {})) == (not arguments)
    assert all(param.isfinite().all() for param in module.parameters())


@pytest.mark.parametrize(("passed", "kept"), [(None, 96), (96, 48)], ids=["counted", "passed"])
def test_a_counted_number_of_examples_follows_the_data_and_a_passed_one_is_kept(passed, kept, tmp_path):
    _, path = trained(tmp_path)
    callback = VOGNCallback(lr=0.01, num_data=passed)
    said = ["The resumed run keeps the checkpoint's num_data=48 (now 96)."] if passed else []
    assert resume_warnings(callback, path, loader(examples=96)) == said
    assert callback.optimizer.param_groups[0]["posterior"]["num_data"] == kept


class Stop(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 8:
            raise KeyboardInterrupt


# The resumed run needs no ModelCheckpoint of its own.
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
def test_a_run_ended_by_ctrl_c_resumes_from_its_last_epoch(tmp_path):
    whole = Classifier()
    quiet_trainer(VOGNCallback(), max_epochs=2).fit(whole, loader())
    saving = ModelCheckpoint(tmp_path, "saved")
    with pytest.raises(SystemExit):
        quiet_trainer(VOGNCallback(), saving, Stop(), max_epochs=2, enable_checkpointing=True).fit(
            Classifier(), loader()
        )
    resumed = Classifier(net=mlp(seed=3))
    quiet_trainer(VOGNCallback(), max_epochs=2).fit(resumed, loader(), ckpt_path=tmp_path / "saved.ckpt")
    assert_same_bits(weights(resumed), weights(whole))
