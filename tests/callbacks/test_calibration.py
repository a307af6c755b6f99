"""calibrate=True in a Trainer, against `calibrate` on the same data."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from distributed import run_on_ranks
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from noisy_classes import TEST, TRAIN, VALIDATION, Data, batches, noisy
from tiny_training import FEATURES, Classifier, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from lightning_bayes import (
    BatchNormRecalibration,
    Calibration,
    DeepEnsembleCallback,
    LaplaceCallback,
    MCDropoutCallback,
    MultiModeCallback,
    VOGNCallback,
    calibrate,
    load_posterior,
    mc_predict,
)
from lightning_bayes.callbacks.evaluation.validation_rows import rows_of, thinned
from lightning_bayes.callbacks.recalibration import recalibrated
from lightning_bayes.cli.bayes_cli import instantiate
from lightning_bayes.errors import HyperparameterError, PosteriorError, UnsupportedTrainingError
from lightning_bayes.predictive import PosteriorSamples, choose_calibration
from lightning_bayes.predictive.temperature import SHRINKAGE, penalty

S = 4


class Plain(Classifier):
    """A user's module, without any attribute or return value for callbacks."""

    def __init__(self, net=None, loss=F.cross_entropy):
        super().__init__(lambda module: torch.optim.Adam(module.parameters(), lr=5e-2), net, loss)

    def validation_step(self, batch, batch_idx):
        self(batch[0])

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))


def normed():
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def vogn(**kwargs):
    return VOGNCallback(**{"eval_samples": S, "relative_noise": 0.1, "calibrate": True, **kwargs})


# Lightning warns that the test has no ModelCheckpoint.
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.parametrize("linearized", [False, True])
def test_a_fit_ends_calibrated_and_checkpoint_test_and_prediction_use_it(tmp_path, linearized):
    callback, module = vogn(linearized=linearized), Plain()
    saved = ModelCheckpoint(tmp_path, filename="last")
    # Until the mean is overconfident, and the budget allows a search over widths.
    trainer = quiet_trainer(callback, saved, enable_checkpointing=True, max_epochs=240)
    trainer.fit(module, datamodule=Data())
    posterior = callback.optimizer.posterior()
    expected = calibrate(module, posterior, batches(VALIDATION), S, linearized=linearized)
    assert expected.posterior.temperature > 1.2
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
    trainer = quiet_trainer(laplace, calibration, max_epochs=240)
    trainer.fit(module, datamodule=Data())
    expected = calibrate(module, laplace.posterior, batches(VALIDATION), S).posterior
    assert calibration.scale == expected.scale
    assert calibration.temperature == pytest.approx(expected.temperature, rel=1e-3)


def test_regression_gets_a_width_and_no_temperature():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(80, FEATURES, generator=generator)
    data = TensorDataset(x, x[:, :1] + 0.3 * torch.randn(80, 1, generator=generator))
    module = Plain(nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1)), F.mse_loss)
    callback, calibration = vogn(relative_noise=1.0, calibrate=False), Calibration()
    quiet_trainer(callback, calibration, max_epochs=3).fit(module, batches(data), batches(data))
    expected = calibrate(module, callback.optimizer.posterior(), batches(data), S, link="identity").posterior
    assert (calibration.scale, calibration.temperature) == (expected.scale, 1.0)


ADDED = {
    "a posterior": (lambda: [vogn(calibrate=False)], lambda: [vogn()]),
    "a network alone": (list, lambda: [Calibration()]),
}


@pytest.mark.parametrize("case", ADDED)
def test_calibration_leaves_weights_modes_random_numbers_and_callbacks_alone(case):
    runs = []
    for callbacks in ADDED[case]:
        torch.manual_seed(0)
        module, trainer = Plain(), quiet_trainer(*callbacks(), max_epochs=3)
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
    assert "and width 1 (no other was tried), chosen on 60 validation examples" in caplog.text


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
        UnsupportedTrainingError,
        match=r"VOGNCallback\(calibrate=True\) fits its width and temperature on a validation set, but this fit has none",
    ):
        quiet_trainer(vogn()).fit(Classifier(), batches(TRAIN))
    with pytest.raises(UnsupportedTrainingError, match=r"calibrate=True\) and Calibration both choose the width"):
        quiet_trainer(vogn(), Calibration()).fit(Plain(), datamodule=Data())
    with pytest.raises(PosteriorError, match="has not chosen a width"):
        Calibration().scaled(None)


def test_batches_whose_rows_are_not_known_are_refused_at_the_first_validation():
    ragged = DataLoader(VALIDATION, 16, collate_fn=lambda rows: (*default_collate(rows), torch.zeros(3)))
    with pytest.raises(
        UnsupportedTrainingError, match=r"those of a tuple are not known. Yield pairs \(inputs, targets\)"
    ):
        quiet_trainer(vogn()).fit(Plain(), batches(TRAIN), ragged)


# -- samples without a width ------------------------------------------------------------------------------------------


def best_temperature(outputs, targets):
    return choose_calibration(lambda scale: outputs, targets, "softmax", width=False).temperature


# Lightning warns that the test has no ModelCheckpoint.
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
def test_a_network_alone_gets_a_temperature_and_keeps_it(tmp_path):
    """Against temperature scaling by hand, on a module that no callback of the package trains."""
    calibration, saved, module = Calibration(), ModelCheckpoint(tmp_path, filename="last"), Plain()
    trainer = quiet_trainer(calibration, saved, enable_checkpointing=True, max_epochs=150)
    trainer.fit(module, datamodule=Data())
    x, y = TEST.tensors
    with torch.no_grad():
        logits, held_out = module.eval()(x), module(VALIDATION.tensors[0])
    assert calibration.scale == 1
    assert calibration.temperature == pytest.approx(best_temperature(held_out[None], VALIDATION.tensors[1]), rel=1e-4)
    assert calibration.temperature > 1.2  # it memorises
    (tested,) = trainer.test(module, datamodule=Data(), verbose=False)
    assert tested["test_loss"] == pytest.approx(F.cross_entropy(logits / calibration.temperature, y).item(), rel=1e-5)
    assert tested["test_loss"] < F.cross_entropy(logits, y)
    predicted = torch.cat([each["probs"] for each in trainer.predict(module, datamodule=Data())])
    torch.testing.assert_close(predicted, (logits / calibration.temperature).softmax(-1))
    fresh = Calibration()  # another process, without a validation set
    (again,) = quiet_trainer(fresh).test(Plain(), batches(TEST), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert (fresh.temperature, again["test_loss"]) == (calibration.temperature, pytest.approx(tested["test_loss"]))


OTHERS = {
    "dropout": lambda: [MCDropoutCallback(eval_samples=S, p=0.05, layers=r"net\.0")],
    "ensemble": lambda: [DeepEnsembleCallback(2, calibrate=False)],
    "modes": lambda: [MultiModeCallback(2, calibrate=False)],
    "modes of a posterior": lambda: [vogn(calibrate=False), MultiModeCallback(2)],
}


@pytest.mark.parametrize("others", OTHERS)
def test_samples_without_a_width_get_a_temperature_that_lowers_the_nll(others):
    calibration, results = Calibration(), []
    for callbacks in ([], [calibration]):
        torch.manual_seed(0)
        module, trainer = Plain(), quiet_trainer(*OTHERS[others](), *callbacks, max_epochs=150)
        trainer.fit(module, datamodule=Data())
        results.append(trainer.test(module, datamodule=Data(), verbose=False)[0]["test_loss"])
    assert calibration.scale == 1
    assert calibration.temperature > 1
    assert results[1] < results[0]


def test_a_checkpoint_without_the_two_numbers_is_calibrated_before_the_test(tmp_path):
    callback, module = vogn(calibrate=False), Plain()
    trainer = quiet_trainer(callback, max_epochs=150)
    trainer.fit(module, datamodule=Data())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    missing, asked = Calibration(), Calibration(linearized=True)
    asked.load_state_dict({"scale": 7.0, "linearized": False, "temperature": 3.0})  # of another predictive
    for calibration, linearized in ((missing, False), (asked, True)):
        host = quiet_trainer(vogn(calibrate=False), calibration)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Be aware that when using .ckpt_path.")
            host.test(Plain(), datamodule=Data(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
        posterior = callback.optimizer.posterior()
        expected = calibrate(module, posterior, batches(VALIDATION), S, linearized=linearized).posterior
        assert (calibration.scale, calibration.temperature) == (
            expected.scale,
            pytest.approx(expected.temperature, rel=1e-3),
        )


def test_a_resumed_fit_discards_the_numbers_of_earlier_weights_and_chooses_again(tmp_path):
    first, again, seen = Calibration(), Calibration(), []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, *args):
            seen.append((again.scale, again.temperature))

    trainer = quiet_trainer(first, max_epochs=60)
    trainer.fit(Plain(), datamodule=Data())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    host = quiet_trainer(again, Watch(), max_epochs=62)
    host.fit(Plain(), datamodule=Data(), ckpt_path=tmp_path / "last.ckpt")
    assert set(seen) == {(None, 1.0)}
    assert again.scale == 1


@pytest.mark.parametrize("of", ["sample", "mean"])
def test_recalibrated_statistics_belong_to_the_prediction_that_is_calibrated(of, monkeypatch):
    seen = []

    def recorded(trainer, module, samples):
        found = recalibrated(trainer, module, samples)
        seen.append(found is not samples)
        return found

    calibration = Calibration(refit=True, linearized=of == "mean")
    trainer = quiet_trainer(vogn(calibrate=False), calibration, BatchNormRecalibration(2, of=of), max_epochs=2)
    module = Plain(normed())
    trainer.fit(module, datamodule=Data())
    monkeypatch.setattr("lightning_bayes.callbacks.calibrating.held_out.recalibrated", recorded)
    trainer.test(module, datamodule=Data(), verbose=False)
    assert all(seen)
    assert len(seen) == 2 if of == "mean" else len(seen) >= 4  # two determine the outputs of an expansion at any width


class KeepsBatches(Plain):
    """Keeps the inputs of its newest epoch."""

    def on_train_epoch_start(self):
        self.inputs = []

    def training_step(self, batch, batch_idx):
        self.inputs.append(batch[0].clone())
        return super().training_step(batch, batch_idx)


def test_the_end_of_a_fit_calibrates_samples_with_statistics_of_their_own():
    callback, calibration, module = vogn(calibrate=False, relative_noise=0.3), Calibration(), KeepsBatches(normed())
    quiet_trainer(callback, calibration, BatchNormRecalibration(2), max_epochs=150).fit(module, datamodule=Data())
    posterior = callback.optimizer.posterior()
    x, y = VALIDATION.tensors

    def objective(temperature, recalibrate_on):
        options = {"recalibrate_on": recalibrate_on, "temperature": temperature}
        nll = F.nll_loss(mc_predict(module, posterior, x, S, **options).probs.log(), y, reduction="sum")
        return float(nll) + penalty(temperature, SHRINKAGE)

    def is_lowest(recalibrate_on):
        return all(
            objective(calibration.temperature, recalibrate_on)
            < objective(factor * calibration.temperature, recalibrate_on)
            for factor in (0.98, 1.02)
        )

    assert is_lowest(module.inputs[:2])
    assert not is_lowest(())


def test_linearised_samples_with_statistics_of_their_own_are_refused():
    module, trainer = Plain(normed()), quiet_trainer(vogn(calibrate=False, linearized=True), BatchNormRecalibration(2))
    trainer.fit(module, datamodule=Data())
    with pytest.raises(HyperparameterError, match=r"expansions of one network.*of='mean'"):
        trainer.test(module, datamodule=Data(), verbose=False)


def fit_on_ranks(rank):
    calibration, module = Calibration(), Plain()
    trainer = quiet_trainer(
        vogn(calibrate=False), calibration, max_epochs=60, devices=2, strategy="ddp", use_distributed_sampler=True
    )
    trainer.fit(module, batches(TRAIN), batches(VALIDATION))
    x, y = VALIDATION.tensors
    samples = PosteriorSamples(trainer.callbacks[0].optimizer.posterior(), S)
    with torch.no_grad():
        outputs = samples.outputs(module.eval(), lambda: module(x))
    return [calibration.scale, calibration.temperature, best_temperature(outputs, y)]


@pytest.mark.ddp
def test_two_ranks_choose_for_the_whole_validation_set(tmp_path):
    first, second = run_on_ranks(fit_on_ranks, 2, tmp_path)
    assert first[:2] == second[:2]
    assert first[:2] == [1, pytest.approx(first[2], rel=1e-3)]


@pytest.mark.parametrize("more", [[], ["--trainer.callbacks.linearized=true"]], ids=["sampled", "linearised"])
def test_from_the_command_line(more):
    run = instantiate("digits+mlp+vogn+calibration", "--trainer.accelerator=cpu", "--trainer.logger=false", *more)
    kinds = [type(callback).__name__ for callback in run.trainer.callbacks]
    assert {"Calibration", "VOGNCallback"} <= set(kinds)
    found = [callback for callback in run.trainer.callbacks if isinstance(callback, VOGNCallback)]
    assert found[0].linearized == bool(more)
