"""The posterior metrics that training logs."""

from __future__ import annotations

import pytest
from lightning.pytorch.loggers import CSVLogger
from tiny_training import Classifier, fit

from lightning_bayes import OGNCallback, VOGNCallback


def determined_by_hand(module, optimizer):
    """Σ s / (s + 0.001 mean s), tensor by tensor, without an explicit prior."""
    curvatures = [optimizer.state[param]["curvature"] for param in module.parameters()]
    return float(sum((s / (s + 0.001 * s.mean())).sum() for s in curvatures))


def test_the_effective_number_of_parameters_is_logged_as_counted_by_hand():
    module, callback = Classifier(), VOGNCallback()
    trainer = fit(module, callback)
    expected = determined_by_hand(module, callback.optimizer)
    assert trainer.callback_metrics["posterior/effective_parameters"] == pytest.approx(expected)
    q = callback.optimizer.posterior()
    shares = [1 - q.prior_precision[name] * variance for name, variance in q.variance().items()]
    assert float(sum(share.sum() for share in shares)) == pytest.approx(expected, rel=1e-4)
    assert 0 < expected < sum(param.numel() for param in module.parameters())
    assert trainer.callback_metrics["posterior/skipped_updates"] == 0


def test_a_stronger_prior_leaves_fewer_parameters_to_the_data():
    few, many = (
        float(fit(Classifier(), VOGNCallback(prior_precision=p)).callback_metrics["posterior/effective_parameters"])
        for p in (1e3, 1e-3)
    )
    assert few < 0.5 * many


def test_without_noise_there_is_none():
    metrics = fit(Classifier(), OGNCallback()).callback_metrics
    assert set(metrics) == {"posterior/skipped_updates"}


def test_the_logger_gets_both(tmp_path):
    logger = CSVLogger(tmp_path)
    fit(Classifier(), VOGNCallback(), logger=logger, max_epochs=2)
    header = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    assert {"posterior/effective_parameters", "posterior/skipped_updates"} <= set(header.split(","))


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
