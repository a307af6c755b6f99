"""Every attribute that a callback replaces is restored after a run, an exception and Ctrl-C."""

from __future__ import annotations

import functools
import signal
import types
from functools import partial

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from tiny_training import CLASSES, ValidatedClassifier, loader, mlp, quiet_trainer

from lightning_bayes import Calibration, MCDropoutCallback, NoisyKFACCallback, VOGNCallback, load_posterior
from lightning_bayes.callbacks.fit.checkpoint_io import AtomicCheckpointIO
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.zoo import BayesClassifier

STAGES = ("fit", "validate", "test", "predict")
MODULE_ATTRIBUTES = ("forward", "sampled_forward", "averages", "mean_forward", "predict_step", "temperature")


class Module(ValidatedClassifier):
    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)


def parts(trainer, module):
    """Objects whose attributes a callback could replace, by name."""
    loop = trainer.fit_loop
    found = {"trainer": trainer, "strategy": trainer.strategy, "checkpoint_io": trainer.strategy.checkpoint_io}
    found |= {"fit_loop": loop, "epoch_loop": loop.epoch_loop, "automatic": loop.epoch_loop.automatic_optimization}
    found |= {f"{stage}_loop": getattr(trainer, f"{stage}_loop") for stage in ("validate", "test", "predict")}
    return found | {f"module.{name}": part for name, part in module.named_modules()}


def functions(target):
    """Instance attributes that are functions, as patches are. Numbers, tensors and objects are results."""
    kinds = (types.FunctionType, types.MethodType, functools.partial)
    return {name: value for name, value in vars(target).items() if isinstance(value, kinds)}


def snapshot(trainer, module):
    """Everything that could be patched."""
    state = {name: functions(target) for name, target in parts(trainer, module).items()}
    return state | {
        "plugin": trainer.strategy.checkpoint_io,
        "hooks": {name: list(part._forward_hooks) for name, part in module.named_modules()},
        "SIGTERM": signal.getsignal(signal.SIGTERM),
        "attributes": {name: vars(module).get(name) for name in MODULE_ATTRIBUTES},
    }


class Fails(Callback):
    """Records the patches in the middle of a run, and can raise there."""

    error = patched = None

    def on_train_batch_end(self, trainer, pl_module, *arguments):
        self.patched = type(trainer.strategy.checkpoint_io) is AtomicCheckpointIO
        self.fail(trainer)

    def on_test_batch_end(self, trainer, pl_module, *arguments):
        self.patched = "forward" in vars(pl_module)
        self.fail(trainer)

    def fail(self, trainer):
        if self.error is not None and not trainer.sanity_checking:
            raise self.error

    on_validation_batch_end = on_predict_batch_end = on_test_batch_end


def run(trainer, module, stage):
    trainer.fit_loop.max_epochs += 1
    getattr(trainer, stage)(module, *([loader(), loader()] if stage == "fit" else [loader()]))


def trained(*callbacks):
    trainer, module = quiet_trainer(*callbacks, enable_checkpointing=False), Module()
    trainer.fit(module, loader(), loader())
    return trainer, module


def names(state):
    return {name: sorted(value) for name, value in state.items() if isinstance(value, dict)}


@pytest.mark.usefixtures("_sigint")
@pytest.mark.parametrize("error", [None, RuntimeError("out of memory"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("callback_class", [VOGNCallback, NoisyKFACCallback])
def test_everything_patched_is_put_back(callback_class, stage, error):
    fails = Fails()
    trainer, module = trained(callback_class(), fails)
    before = snapshot(trainer, module)
    assert names(before) == names(snapshot(*trained(Fails())))  # as plain Lightning leaves it
    assert type(before["plugin"]) is TorchCheckpointIO
    fails.error, fails.patched = error, None
    if error is None:
        run(trainer, module, stage)
    else:
        with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else RuntimeError):
            run(trainer, module, stage)
    assert fails.patched
    assert snapshot(trainer, module) == before


@pytest.mark.usefixtures("_sigint")
@pytest.mark.parametrize("error", [None, RuntimeError("out of memory"), KeyboardInterrupt()], ids=repr)
def test_inserted_dropout_is_taken_out(error):
    fails = Fails()
    trainer, module = trained(MCDropoutCallback(p=0.1, layers=r"net\.0"), fails)
    before = snapshot(trainer, module)
    assert before["hooks"]["net.0"] == []
    fails.error = error
    if error is None:
        run(trainer, module, "test")
    else:
        with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else RuntimeError):
            run(trainer, module, "test")
    assert snapshot(trainer, module) == before


@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")], ids=repr)
def test_a_calibrated_module_is_put_back(error):
    fails, scaling = Fails(), Calibration(refit=True)
    module = BayesClassifier(mlp(), num_classes=CLASSES, optimizer=partial(torch.optim.Adam, lr=1e-2))
    trainer = quiet_trainer(VOGNCallback(), scaling, fails)
    trainer.fit(module, loader(), loader())
    before, fails.error = snapshot(trainer, module), error
    if error is None:
        trainer.test(module, loader())
    else:
        with pytest.raises(RuntimeError):
            trainer.test(module, loader())
    assert scaling.scale is not None
    assert snapshot(trainer, module) == before


def test_a_checkpoint_that_another_callback_saves_on_an_exception_is_still_complete(tmp_path):
    """Lightning calls on_exception of checkpoint callbacks last; the plugin is torn down after them."""
    written = []

    class Saves(Checkpoint):
        def on_exception(self, trainer, pl_module, exception):
            written.append(type(trainer.strategy.checkpoint_io))
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    fails = Fails()
    fails.error = RuntimeError("out of memory")
    trainer = quiet_trainer(VOGNCallback(), fails, Saves(), enable_checkpointing=True)
    with pytest.raises(RuntimeError):
        trainer.fit(Module(), loader(), loader())
    assert written == [AtomicCheckpointIO]
    assert type(trainer.strategy.checkpoint_io) is TorchCheckpointIO
    assert load_posterior(tmp_path / "last.ckpt").mean


def test_a_run_that_is_refused_in_setup_leaves_nothing_behind():
    module = Module(lambda m: torch.optim.LBFGS(m.parameters()))
    trainer = quiet_trainer(VOGNCallback())
    before = snapshot(trainer, module)
    with pytest.raises(UnsupportedTrainingError):
        trainer.fit(module, loader(), loader())
    found = snapshot(trainer, module)
    assert found["plugin"] is before["plugin"]
    assert names(found) == names(before)
