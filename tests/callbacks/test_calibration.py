"""calibrate=True in a Trainer, against `calibrate` on the same data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from noisy_classes import TEST, TRAIN, VALIDATION, Data, batches, noisy
from tiny_training import FEATURES, Classifier, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import (
    Calibration,
    LaplaceCallback,
    PosteriorScale,
    VOGNCallback,
    calibrate,
    load_posterior,
    mc_predict,
)
from lightning_bayes.callbacks.calibration import rows_of, thinned
from lightning_bayes.errors import UnsupportedTrainingError

S = 4


class Plain(Classifier):
    """A user's module, without any attribute or return value for callbacks."""

    def __init__(self, net=None):
        super().__init__(lambda module: torch.optim.Adam(module.parameters(), lr=5e-2), net)

    def validation_step(self, batch, batch_idx):
        self(batch[0])

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))


def vogn(**kwargs):
    return VOGNCallback(**{"eval_samples": S, "relative_noise": 0.1, "calibrate": True, **kwargs})


# Lightning warns that the test has no ModelCheckpoint.
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.parametrize("linearized", [False, True])
def test_a_fit_ends_calibrated_and_checkpoint_test_and_prediction_use_it(tmp_path, linearized):
    callback, module = vogn(linearized=linearized), Plain()
    saved = ModelCheckpoint(tmp_path, filename="last")
    trainer = quiet_trainer(
        callback, saved, enable_checkpointing=True, max_epochs=150
    )  # until the mean is overconfident
    trainer.fit(module, datamodule=Data())
    posterior = callback.optimizer.posterior()
    expected = calibrate(module, posterior, batches(VALIDATION), S, linearized=linearized)
    assert expected.calibration.choice != "neither"
    found = load_posterior(tmp_path / "last.ckpt")
    assert (found.scale, found.linearized) == (expected.posterior.scale, linearized)
    assert found.temperature == pytest.approx(expected.posterior.temperature, rel=1e-3)
    assert trainer.callback_metrics["val/posterior_scale"] == found.scale
    x, y = TEST.tensors
    probs = mc_predict(module.net, found.select("net."), x, S).probs
    (tested,) = trainer.test(module, datamodule=Data(), verbose=False)
    assert tested["test_loss"] == pytest.approx(F.nll_loss(probs.log(), y).item(), rel=1e-4)
    predicted = torch.cat([each["probs"] for each in trainer.predict(module, datamodule=Data())])
    torch.testing.assert_close(predicted, probs, rtol=1e-4, atol=1e-5)
    host = quiet_trainer(vogn(linearized=linearized))  # another process, without a validation set
    (again,) = host.test(Plain(), batches(TEST), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert again["test_loss"] == pytest.approx(tested["test_loss"], rel=1e-5)


def test_a_laplace_posterior_is_calibrated_by_the_callback_beside_it():
    laplace, calibration, module = LaplaceCallback(linearized=False, eval_samples=S), Calibration(), Plain()
    trainer = quiet_trainer(laplace, calibration, max_epochs=200)
    trainer.fit(module, datamodule=Data())
    expected = calibrate(module, laplace.posterior, batches(VALIDATION), S).posterior
    assert calibration.scale == expected.scale
    assert calibration.temperature == pytest.approx(expected.temperature, rel=1e-3)


def test_regression_gets_a_width_and_no_temperature():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(80, FEATURES, generator=generator)
    data = TensorDataset(x, x[:, :1] + 0.3 * torch.randn(80, 1, generator=generator))

    class Mse(Plain):
        def training_step(self, batch, batch_idx):
            return F.mse_loss(self(batch[0]), batch[1])

    module = Mse(nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1)))
    callback, calibration = vogn(relative_noise=1.0, calibrate=False), Calibration()
    quiet_trainer(callback, calibration, max_epochs=3).fit(module, batches(data), batches(data))
    expected = calibrate(module, callback.optimizer.posterior(), batches(data), S, link="identity").posterior
    assert (calibration.scale, calibration.temperature) == (expected.scale, 1.0)


def test_calibration_leaves_weights_modes_random_numbers_and_callbacks_alone():
    runs = []
    for calibrates in (False, True):
        torch.manual_seed(0)
        module, trainer = Plain(), quiet_trainer(vogn(calibrate=calibrates), max_epochs=3)
        trainer.fit(module, datamodule=Data())
        runs.append([*(p.detach().clone() for p in module.parameters()), torch.get_rng_state()])
        assert module.training
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    trainer.fit(module, datamodule=Data())
    assert [type(c).__name__ for c in trainer.callbacks].count("Calibration") == 1


def test_a_short_fit_chooses_a_temperature_only(caplog):
    calibration = Calibration()
    trainer = quiet_trainer(vogn(calibrate=False, eval_samples=10), calibration, max_epochs=60)
    with caplog.at_level("INFO"):
        trainer.fit(Plain(), datamodule=Data())
    assert calibration.scale == 1
    assert calibration.temperature > 1
    assert "width 1 (no other was tried in so short a fit), temperature" in caplog.text


def test_few_rows_are_spread_over_sorted_validation_data():
    data = noisy(600, 5)
    targets = torch.arange(600) // 200  # sorted by class
    loader = DataLoader(TensorDataset(data.tensors[0], targets), batch_size=50)
    kept = torch.cat([y for _, y in thinned(loader, len(loader), 60)])
    assert kept.bincount().tolist() == [20, 20, 20]
    assert sum(rows_of(batch) for batch in thinned(loader, len(loader), 6)) == 6
    assert sum(rows_of(batch) for batch in thinned(loader, len(loader), 10_000)) == 600
    first = thinned(iter(loader), None, 120)  # an unknown length: the first batches
    assert sum(rows_of(batch) for batch in first) == 150
    nested = [({"ids": torch.zeros(6, 2), "scale": torch.zeros(3)}, torch.zeros(6))]
    ((inputs, _),) = thinned(nested, 1, 3)
    assert (inputs["ids"].shape, inputs["scale"].shape) == ((3, 2), (3,))


def test_what_cannot_be_calibrated_is_refused_before_the_fit():
    with pytest.raises(
        UnsupportedTrainingError, match="Calibration fits its width and temperature on a validation set, but this fit"
    ):
        quiet_trainer(vogn()).fit(Classifier(), batches(TRAIN))
    with pytest.raises(UnsupportedTrainingError, match="calibrate=True and PosteriorScale both choose the width"):
        quiet_trainer(vogn(), PosteriorScale()).fit(Plain(), datamodule=Data())
    with pytest.raises(UnsupportedTrainingError, match=r"no callback of this trainer has one\. Add VOGNCallback"):
        quiet_trainer(Calibration()).fit(Plain(), datamodule=Data())
