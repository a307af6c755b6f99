"""Runs killed in the middle of an epoch resume bit by bit, and checkpoints load without the plugin."""

from __future__ import annotations

import importlib.util
import os
import signal
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
from lightning_bayes.errors import PosteriorError

# Data order and everything else here is deterministic; Lightning saves no generator state, so no dropout and no shuffling.
SCRIPT = '''
import os, signal, sys
import torch, torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, SequentialLR
from torch.utils.data import TensorDataset
from lightning_bayes import VOGNCallback

torch.set_num_threads(1)


class StatefulLoader:
    """Six batches per epoch; it knows where it was, so a resumed epoch goes on with the next batch."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(48, 4, generator=generator), torch.randint(3, (48,), generator=generator)
        self.dataset, self.batch_size, self.position, self.start = TensorDataset(x, y), 8, 0, 0

    def __len__(self):
        return 6

    def __iter__(self):
        start, self.start = self.start, 0
        for index in range(start, 6):
            self.position = index + 1
            yield self.dataset[8 * index : 8 * index + 8]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]


class Net(LightningModule):
    def __init__(self, scheduled, kill):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        self.scheduled, self.kill, self.passes = scheduled, kill, 0

    def training_step(self, batch, batch_idx):
        self.passes += 1
        # In the second of the batch's two passes: the weights are a sample, half of the batch's work is done.
        if self.kill and self.current_epoch == 1 and batch_idx == 3 and self.passes % 2 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        if not self.scheduled:
            return optimizer
        stages = [ConstantLR(optimizer, 0.1, 4), CosineAnnealingLR(optimizer, 14)]
        scheduler = SequentialLR(optimizer, stages, milestones=[4])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def run(case, directory, kill=False, resume=None, model_seed=0):
    torch.manual_seed(model_seed)
    net = Net(scheduled=case == "scheduled", kill=kill)
    callback = VOGNCallback(mc_samples=2, betas=(0.9, 0.99), init_precision=300.0)
    trainer = Trainer(
        callbacks=[callback, ModelCheckpoint(directory, "{step}", every_n_train_steps=2, save_top_k=-1)],
        max_epochs=3, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=2 if case == "accumulated" else 1,
    )
    trainer.fit(net, StatefulLoader(), ckpt_path=resume)
    optimizer = callback.optimizer
    state = {}
    for name, param in net.named_parameters():
        values = dict(optimizer.state[param])
        values |= {f"base.{k}": v for k, v in optimizer.base_step.base.state[param].items()}
        state |= {f"{name}/{k}": torch.as_tensor(v) for k, v in values.items()}
    settings = {"lr": optimizer.param_groups[0]["lr"], **optimizer.param_groups[0]["posterior"]}
    group = {k: torch.tensor(settings[k]) for k in ("lr", "step", "num_data", "noise_seed")}
    return {**net.state_dict(), **state, **group, "global_step": torch.tensor(trainer.global_step)}


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], kill=True)
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "training_run.py"
    path.write_text(SCRIPT, "utf-8")
    return path


@pytest.fixture(scope="module")
def training_run(script):
    spec = importlib.util.spec_from_file_location("training_run", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.run


def environment():
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


# The second run writes next to the first one's files, as a resumed run does.
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
# torch 2.5's SequentialLR calls a deprecated form of its own schedulers.
@pytest.mark.filterwarnings("ignore:The epoch parameter in .* was not necessary")
@pytest.mark.filterwarnings("ignore:The number of training batches .* smaller than the logging interval")
@pytest.mark.parametrize(("case", "last_step"), [("plain", 8), ("scheduled", 8), ("accumulated", 4)])
def test_a_run_killed_within_an_epoch_resumes_bit_for_bit(case, last_step, script, training_run, tmp_path):
    command = [sys.executable, str(script), case, str(tmp_path / "killed")]
    killed = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    files = sorted((tmp_path / "killed").glob("*.ckpt"), key=lambda f: int(f.stem.removeprefix("step=")))
    assert files[-1].stem == f"step={last_step}"  # two of the six batches of the second epoch
    resumed = training_run(case, tmp_path / "killed", resume=files[-1], model_seed=1)
    assert_same_bits(resumed, training_run(case, tmp_path / "whole"))
    assert resumed["global_step"] == (9 if case == "accumulated" else 18)


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


def test_a_plain_checkpoint_cannot_be_resumed_as_a_posterior(tmp_path):
    trainer = quiet_trainer()
    trainer.fit(Classifier(), loader())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    message = r"not written with VOGNCallback, so it holds no posterior to resume.*load them into the module and fit"
    with pytest.raises(PosteriorError, match=message):
        quiet_trainer(VOGNCallback(), max_epochs=2).fit(Classifier(), loader(), ckpt_path=tmp_path / "plain.ckpt")


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
def test_lightning_resumes_nothing_from_a_checkpoint_of_weights_alone(tmp_path):
    trainer = quiet_trainer(VOGNCallback())
    trainer.fit(Classifier(), loader())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        quiet_trainer(VOGNCallback(), max_epochs=2).fit(Classifier(), loader(), ckpt_path=tmp_path / "weights.ckpt")


def test_a_checkpoint_of_another_model_names_the_keys(tmp_path):
    _, path = trained(tmp_path)
    other = Classifier(net=torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)))
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"net\.1\.weight".*Unexpected key.*"net\.2\.weight"'):
        quiet_trainer(VOGNCallback(), max_epochs=3).fit(other, loader(), ckpt_path=path)


class Reordered(Classifier):
    def configure_optimizers(self):
        return torch.optim.AdamW(list(self.parameters())[::-1], lr=1e-2)


def test_a_checkpoint_with_parameters_in_another_order_is_refused(tmp_path):
    """An optimizer's state is stored by position; the names reveal that the positions have changed."""
    _, path = trained(tmp_path)
    with pytest.raises(PosteriorError, match=r"the parameter groups .saved: net\.0\.weight, .*now: net\.2\.bias, "):
        quiet_trainer(VOGNCallback(lr=0.01), max_epochs=3).fit(Reordered(), loader(), ckpt_path=path)


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
    callback = VOGNCallback(lr=0.01, betas=(0.8, 0.99), kl_weight=0.5, prior_precision=3.0, seed=4)
    (message,) = resume_warnings(callback, path)
    for part in (
        r"keeps the checkpoint's",
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


def test_another_learning_rate_is_named(tmp_path):
    _, path = trained(tmp_path, VOGNCallback(lr=0.01))
    (message,) = resume_warnings(VOGNCallback(lr=0.05), path)
    assert message == "The resumed run keeps the checkpoint's lr=0.01 (now 0.05)."


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


def test_a_run_of_the_base_optimizer_cannot_be_resumed_without_it(tmp_path):
    _, path = trained(tmp_path, VOGNCallback())
    with pytest.raises(
        PosteriorError,
        match=r"the step .saved: user; now: natural., the optimizer that moves the mean .saved: AdamW; now: none",
    ):
        quiet_trainer(VOGNCallback(lr=0.01), max_epochs=3).fit(Classifier(), loader(), ckpt_path=path)


@pytest.mark.parametrize(("passed", "kept"), [(None, 96), (96, 48)], ids=["counted", "passed"])
def test_a_counted_number_of_examples_follows_the_data_and_a_passed_one_is_kept(passed, kept, tmp_path):
    _, path = trained(tmp_path)
    callback = VOGNCallback(lr=0.01, num_data=passed)
    said = ["The resumed run keeps the checkpoint's num_data=48 (now 96)."] if passed else []
    assert resume_warnings(callback, path, loader(examples=96)) == said
    assert callback.optimizer.param_groups[0]["posterior"]["num_data"] == kept


def test_a_resumed_run_goes_on_counting(tmp_path):
    _, path = trained(tmp_path)
    callback = VOGNCallback(lr=0.01)
    quiet_trainer(callback, max_epochs=3).fit(Classifier(), loader(), ckpt_path=path)
    assert callback.optimizer.num_updates == 18
    assert {int(state["step"]) for state in callback.optimizer.state.values()} == {18}


def test_a_run_that_is_finished_already_has_the_weights_of_its_checkpoint(tmp_path):
    module, path = trained(tmp_path)
    resumed = Classifier(net=mlp(seed=7))
    quiet_trainer(VOGNCallback(lr=0.01), max_epochs=2).fit(resumed, loader(), ckpt_path=path)
    assert resumed.training_steps == 0
    assert_same_bits(weights(resumed), weights(module))


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
