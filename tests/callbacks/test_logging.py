"""What training logs about the posterior."""

from __future__ import annotations

import logging

import pytest
from lightning.pytorch.loggers import CSVLogger
from tiny_training import EXAMPLES, Classifier, fit

from lightning_bayes import OGNCallback, VOGNCallback

EXPLANATION = "of the weights, not the data"


def floored_by_hand(module, optimizer, scales):
    """Share of weights with (κ r)⁻² > N s + 1, r the larger of each tensor's size at the start and now."""
    floored = total = 0
    for name, param in module.named_parameters():
        size = max(scales[name], param.detach().square().mean().sqrt())
        by_curvature = EXAMPLES * optimizer.state[param]["curvature"] + 1.0
        floored += int((by_curvature < (0.3 * size) ** -2).sum())
        total += param.numel()
    return floored / total


def test_floored_share_is_logged_as_counted_by_hand():
    module, callback = Classifier(), VOGNCallback()
    sizes = {name: param.detach().square().mean().sqrt() for name, param in module.named_parameters()}
    for layer in (module.net[0], module.net[2]):  # a bias is as large as its layer's weights
        names = {id(param): name for name, param in module.named_parameters()}
        sizes[names[id(layer.bias)]] = sizes[names[id(layer.weight)]]
    trainer = fit(module, callback)
    expected = floored_by_hand(module, callback.optimizer, sizes)
    assert trainer.callback_metrics["posterior/floored_share"] == pytest.approx(expected)
    assert 0 < expected <= 1
    assert trainer.callback_metrics["posterior/skipped_updates"] == 0


def test_share_falls_when_the_data_set_the_noise():
    """Many examples make curvature's precision exceed the floor's."""
    few, many = (
        float(fit(Classifier(), VOGNCallback(num_data=n)).callback_metrics["posterior/floored_share"])
        for n in (10, 10**7)
    )
    assert many < 0.2 < few


def test_without_noise_there_is_no_share():
    metrics = fit(Classifier(), OGNCallback()).callback_metrics
    assert set(metrics) == {"posterior/skipped_updates"}


def test_without_a_floor_the_share_is_zero():
    assert fit(Classifier(), VOGNCallback(lr=0.01)).callback_metrics["posterior/floored_share"] == 0


def test_the_logger_gets_both(tmp_path):
    logger = CSVLogger(tmp_path)
    fit(Classifier(), VOGNCallback(), logger=logger, max_epochs=2)
    header = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    assert {"posterior/floored_share", "posterior/skipped_updates"} <= set(header.split(","))


@pytest.mark.parametrize(("num_data", "times"), [(10, 1), (10**7, 0)])
def test_a_large_share_is_explained_once(num_data, times, caplog):
    with caplog.at_level(logging.INFO):
        fit(Classifier(), VOGNCallback(num_data=num_data), max_epochs=3)
    assert sum(EXPLANATION in record.getMessage() for record in caplog.records) == times


def test_loss_and_metrics_of_the_module_are_logged_as_before():
    """An epoch metric logged in training_step is its mean over batches and samples."""
    logged = []

    class Logs(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            logged.append(loss.item())
            return loss

    trainer = fit(Logs(), VOGNCallback(mc_samples=2))
    assert len(logged) == 12
    assert trainer.callback_metrics["train_loss"] == pytest.approx(sum(logged) / 12)
