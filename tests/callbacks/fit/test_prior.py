"""A posterior as the prior of a fit: from an object, from a checkpoint, in the summary, and after a restart."""

from __future__ import annotations

import logging
import re
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_training import EXAMPLES, Classifier, assert_same_bits, fit, loader, quiet_trainer

from lightning_bayes import VOGNCallback, load_posterior
from lightning_bayes.posteriors import marginals


@pytest.fixture
def first(tmp_path):
    """The checkpoint of a first task."""
    trainer = fit(Classifier(), VOGNCallback(lr=0.01, prior_precision=5.0), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    return tmp_path / "first.ckpt"


def posterior_after(callback, **arguments):
    fit(Classifier(), callback, max_epochs=2, **arguments)
    return callback.optimizer.posterior()


@pytest.mark.parametrize("lr", [0.01, None], ids=["natural", "user"])
def test_a_checkpoint_means_its_posterior(first, lr):
    by_path = posterior_after(VOGNCallback(lr=lr, prior=str(first)))
    by_object = posterior_after(VOGNCallback(lr=lr, prior=load_posterior(first)))
    scalar = posterior_after(VOGNCallback(lr=lr))
    for name, mean in by_path.mean.items():
        assert torch.equal(mean, by_object.mean[name])
        assert not torch.equal(mean, scalar.mean[name])
        assert by_path.prior_precision[name].shape == mean.shape


def test_the_first_line_of_a_fit_names_weights_without_a_prior_of_their_own(first, caplog):
    prior = load_posterior(first)
    with caplog.at_level(logging.INFO):
        fit(Classifier(), VOGNCallback(lr=0.01, prior=prior))
        fit(Classifier(), VOGNCallback(prior=marginals(prior, ["net.0.weight", "net.0.bias"])))
    text = "parameters have an earlier posterior as their prior"
    assert f". 51 {text}. The noise" in caplog.text
    assert f". 30 {text}; for net.2.weight, net.2.bias, no prior is set" in caplog.text


@pytest.mark.parametrize("is_given", [True, False])
def test_a_resumed_run_keeps_its_prior_and_says_so_unless_it_was_given_again(first, tmp_path, is_given):
    whole, resumed = VOGNCallback(lr=0.01, prior=first), VOGNCallback(lr=0.01, prior=first if is_given else None)
    fit(Classifier(), whole, max_epochs=2)
    fit(Classifier(), VOGNCallback(lr=0.01, prior=first)).save_checkpoint(tmp_path / "part.ckpt")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        quiet_trainer(resumed, max_epochs=2).fit(Classifier(), loader(), ckpt_path=tmp_path / "part.ckpt")
    told = [re.search(r"keeps the checkpoint's prior of each weight.*Start a new fit", str(w.message)) for w in said]
    assert any(told) != is_given
    straight, again = whole.optimizer.posterior(), resumed.optimizer.posterior()
    assert_same_bits({**again.mean, "kl": again.kl()}, {**straight.mean, "kl": straight.kl()})


def test_a_checkpoint_gives_the_prior_and_the_kl_back(first, tmp_path):
    callback = VOGNCallback(lr=0.01, prior=first)
    save = ModelCheckpoint(tmp_path / "second", save_last=True)
    fit(Classifier(), callback, save, enable_checkpointing=True)
    live, stored, before = (
        callback.optimizer.posterior(),
        load_posterior(tmp_path / "second" / "last.ckpt"),
        load_posterior(first),
    )
    torch.testing.assert_close(stored.kl(), live.kl())
    for name, precision in before.precision.items():
        assert torch.equal(stored.prior_precision[name], precision)
        assert torch.equal(stored.prior_mean[name], before.mean[name])
        assert (stored.precision[name] >= precision).all()
    assert stored.num_data == EXAMPLES
