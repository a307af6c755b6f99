"""Fits in processes that end with them: the main process has the weights, and is told how to get the posterior."""

from __future__ import annotations

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_training import Classifier, loader, quiet_trainer

from lightning_bayes import MultiModeCallback, SWAGCallback, VOGNCallback, load_posterior
from lightning_bayes.callbacks.trainer.checks import check_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*(use of fork|the processes of this fit end with it)")


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_notebook", "ddp_spawn"])
@pytest.mark.parametrize("callback", [VOGNCallback(), SWAGCallback(), MultiModeCallback()])
def test_the_fit_says_what_to_load(strategy, callback):
    trainer = quiet_trainer(callback, strategy=strategy, devices=2)
    with pytest.warns(UserWarning, match=rf"{type(callback).__name__}: the processes .* pass ckpt_path='best'"):
        check_trainer(trainer, "fit", type(callback).__name__)


@pytest.mark.parametrize(("strategy", "stage"), [("auto", "fit"), ("ddp", "fit"), ("ddp_spawn", "test")])
def test_other_runs_say_nothing(strategy, stage):
    check_trainer(quiet_trainer(strategy=strategy), stage, "VOGNCallback")


@pytest.mark.slow
def test_the_checkpoint_of_a_forked_fit_holds_the_posterior(tmp_path):
    kept = ModelCheckpoint(tmp_path)
    module = Classifier()
    trainer = quiet_trainer(VOGNCallback(), kept, strategy="ddp_fork", devices=2, enable_checkpointing=True)
    trainer.fit(module, loader())
    posterior = load_posterior(kept.best_model_path)
    assert posterior.mean.keys() == dict(module.named_parameters()).keys()
