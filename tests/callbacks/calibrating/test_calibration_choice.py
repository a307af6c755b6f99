"""By default: a temperature at the end of a fit whose task is known, against temperature scaling by hand."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from distributed import run_on_ranks
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from noisy_classes import TEST, TRAIN, VALIDATION, Data, batches, noisy
from tiny_training import FEATURES, ValidatedClassifier, assert_same_bits, quiet_trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from lightning_bayes import (
    Calibration,
    IVONCallback,
    MultiModeCallback,
    NoisyKFACCallback,
    VOGNCallback,
    load_posterior,
    mc_predict,
)
from lightning_bayes.callbacks.calibrating.held_out import Budget
from lightning_bayes.callbacks.evaluation.validation_rows import KeptRows, merged, rows_of
from lightning_bayes.callbacks.trainer.neighbours import callbacks_of
from lightning_bayes.predictive import PosteriorSamples, choose_calibration, fit_temperature
from lightning_bayes.predictive.temperature import SHRINKAGE

S, EPOCHS = 4, 150  # until the mean is overconfident


class Plain(ValidatedClassifier):
    """A user's module, without any attribute or return value for callbacks."""

    def __init__(self, net=None):
        super().__init__(lambda module: torch.optim.Adam(module.parameters(), lr=5e-2), net)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))


def vogn(**kwargs):
    return VOGNCallback(**{"eval_samples": S, "relative_noise": 0.1, **kwargs})


def calibration_of(trainer):
    (calibration,) = callbacks_of(trainer, Calibration)
    return calibration


SHORT = 40  # long enough to choose


class ManyRows(Data):
    """Enough validation data to tell a temperature from 1."""

    def val_dataloader(self):
        return batches(noisy(400, 1))


def fitted(*callbacks, module=None, data=None, **kwargs):
    torch.manual_seed(0)
    trainer, module = quiet_trainer(*callbacks, **{"max_epochs": EPOCHS, **kwargs}), module or Plain()
    trainer.fit(module, datamodule=data or Data())
    return trainer, module


# Lightning warns that the test has no ModelCheckpoint.
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
def test_a_fit_ends_with_a_temperature_that_checkpoint_and_test_use(tmp_path):
    saved = ModelCheckpoint(tmp_path, filename="last")
    trainer, module = fitted(callback := vogn(), saved, enable_checkpointing=True)
    samples = PosteriorSamples(callback.optimizer.posterior(), S)
    with torch.no_grad():
        held_out, tested = (samples.outputs(module.eval(), lambda x=x: module(x)) for x, _ in map(tensors, SETS))
    temperature = fit_temperature(held_out, VALIDATION.tensors[1], shrinkage=SHRINKAGE)
    calibration = calibration_of(trainer)
    assert calibration.scale == 1
    assert calibration.temperature == pytest.approx(temperature, rel=1e-3)
    assert calibration.temperature > 1.2
    assert trainer.callback_metrics["val/temperature"] == pytest.approx(calibration.temperature)
    found = load_posterior(tmp_path / "last.ckpt")
    assert (found.scale, found.temperature) == (1, calibration.temperature)
    expected = F.nll_loss((tested / found.temperature).softmax(-1).mean(0).log(), TEST.tensors[1]).item()
    (result,) = trainer.test(module, datamodule=Data(), verbose=False)
    assert result["test_loss"] == pytest.approx(expected, rel=1e-4)
    host = quiet_trainer(vogn())  # another process, without a validation set
    (again,) = host.test(Plain(), batches(TEST), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert again["test_loss"] == pytest.approx(expected, rel=1e-4)


SETS = (VALIDATION, TEST)


def tensors(dataset):
    return dataset.tensors


class Log(Callback):
    """What a user sees of the validations of a fit."""

    def __init__(self):
        self.seen = []

    def on_validation_end(self, trainer, pl_module):
        self.seen.append(float(trainer.callback_metrics["val_loss"]))


class BatchNormed(Plain):
    """Keeps statistics, drops out, and counts the calls in training."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(
            nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))
        )


def test_the_fit_is_the_same_to_the_last_bit():
    runs = []
    for calibrate in (False, None):
        log = Log()
        trainer, module = fitted(vogn(calibrate=calibrate), log, module=BatchNormed(), max_epochs=60)
        runs.append((weights(module), {"rng": torch.get_rng_state()}, log.seen, module.training))
    assert calibration_of(trainer).scale == 1
    for one, other in zip(runs[0][:2], runs[1][:2], strict=True):
        assert_same_bits(one, other)
    assert runs[0][2:] == runs[1][2:]


class Frozen(Plain):
    """A backbone whose statistics stay."""

    def on_train_epoch_start(self):
        self.net[1].eval()


def normed(kind):
    torch.manual_seed(1)
    return kind(nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)))


# Lightning warns that the test has no ModelCheckpoint, and of a layer in evaluation mode.
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.", "ignore:Found .* module")
def test_batchnorm_subtracts_the_mean_of_each_sample_after_the_fit(tmp_path):
    saved = ModelCheckpoint(tmp_path, filename="last")
    trainer, module = fitted(vogn(relative_noise=0.3), saved, module=normed(Plain), enable_checkpointing=True)
    posterior, x = load_posterior(tmp_path / "last.ckpt"), TRAIN.tensors[0]
    assert list(posterior.input_means) == ["net.1.running_mean"]
    weight, mean = posterior.input_means["net.1.running_mean"]
    assert weight == "net.0.weight"
    torch.testing.assert_close(mean, x.mean(0, keepdim=True), atol=0.1, rtol=0)  # of 512 of its rows at most
    expected = mc_predict(module, posterior, TEST.tensors[0], samples=S).probs.log()
    (result,) = trainer.test(module, datamodule=Data(), verbose=False)
    assert result["test_loss"] == pytest.approx(F.nll_loss(expected, TEST.tensors[1]).item(), rel=1e-4)
    host = quiet_trainer(vogn(relative_noise=0.3))
    (again,) = host.test(normed(Plain), batches(TEST), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert again["test_loss"] == pytest.approx(result["test_loss"], rel=1e-5)
    frozen, _ = fitted(vogn(), module=normed(Frozen), max_epochs=SHORT)
    assert calibration_of(frozen).scale == 1
    assert calibration_of(frozen).state_dict()["input_means"] == {}


def test_an_earlier_checkpoint_is_tested_without_the_temperature_of_the_end(tmp_path, caplog):
    early = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, every_n_epochs=50)
    trainer, module = fitted(vogn(), early, enable_checkpointing=True)
    temperature = calibration_of(trainer).temperature
    assert temperature > 1.2
    with caplog.at_level("INFO"):
        for epoch in (149, 49):
            trainer.test(module, datamodule=Data(), ckpt_path=tmp_path / f"epoch={epoch}.ckpt", verbose=False)
    (line,) = [each for each in caplog.messages if "has none" in each]
    assert f"VOGNCallback: the temperature {temperature:.3g} belongs to the last weights" in line
    assert (calibration_of(trainer).scale, calibration_of(trainer).temperature) == (None, 1.0)


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
def test_a_resumed_fit_chooses_the_same(tmp_path):
    early = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, every_n_epochs=50)
    whole, _ = fitted(vogn(), early, enable_checkpointing=True)
    resumed = quiet_trainer(vogn(), max_epochs=EPOCHS)
    resumed.fit(Plain(), datamodule=Data(), ckpt_path=tmp_path / "epoch=99.ckpt")
    assert calibration_of(resumed).temperature == calibration_of(whole).temperature


@pytest.mark.parametrize("saves", [True, False])
def test_early_stopping_ends_with_a_temperature(saves, tmp_path):
    saved = [ModelCheckpoint(tmp_path, filename="last")] if saves else []
    stopping = EarlyStopping("val_loss", patience=150)  # until the mean is overconfident
    trainer, _ = fitted(vogn(), stopping, *saved, data=ManyRows(), max_epochs=1000, enable_checkpointing=saves)
    assert trainer.current_epoch < 999
    temperature = calibration_of(trainer).temperature
    assert temperature > 1
    assert not saves or load_posterior(tmp_path / "last.ckpt").temperature == temperature


@pytest.mark.parametrize("callback", [NoisyKFACCallback, IVONCallback])
def test_other_methods_get_a_temperature(callback):
    trainer, _ = fitted(callback(eval_samples=S), max_epochs=SHORT)
    assert calibration_of(trainer).scale == 1


def test_several_modes_get_one_temperature():
    trainer, _ = fitted(vogn(), MultiModeCallback(2), data=ManyRows())
    assert calibration_of(trainer).temperature > 1


def test_a_short_fit_chooses_by_three_samples():
    trainer, module = fitted(vogn(eval_samples=40), max_epochs=SHORT)  # 18 calls, on batches of 16
    calibration = calibration_of(trainer)
    samples = PosteriorSamples(callbacks_of(trainer, VOGNCallback)[0].optimizer.posterior(), 3)
    with torch.no_grad():
        outputs = samples.outputs(module.eval(), lambda: module(VALIDATION.tensors[0]))
    found = choose_calibration(lambda scale: outputs, VALIDATION.tensors[1], "softmax", width=False)
    assert (calibration.scale, calibration.temperature) == (1, pytest.approx(found.temperature, rel=1e-3))


# -- fits that are left as they are -----------------------------------------------------------------------------------

QUIET = {
    "short": ([vogn], {"max_epochs": 3}),
    "trial": ([vogn], {"fast_dev_run": True}),
    "no validation": ([vogn], {"limit_val_batches": 0}),
    "one batch again": ([vogn], {"overfit_batches": 1}),
    "no samples": ([lambda: vogn(eval_samples=0)], {}),
}


@pytest.mark.parametrize("case", QUIET)
def test_a_fit_is_left_alone_without_a_word(case, caplog):
    callbacks, options = QUIET[case]
    with caplog.at_level("INFO"):
        trainer, _ = fitted(*(each() for each in callbacks), **{"max_epochs": SHORT, **options})
    assert (calibration_of(trainer).scale, calibration_of(trainer).temperature) == (None, 1.0)
    assert "alibrat" not in caplog.text
    assert "temperature" not in caplog.text


def test_an_explicit_rate_or_refusal_adds_nothing_and_the_users_own_calibration_stays():
    for callback in (vogn(calibrate=False), VOGNCallback(lr=0.1)):
        trainer, _ = fitted(callback, max_epochs=1)
        assert callbacks_of(trainer, Calibration) == []
    own = Calibration()
    trainer, _ = fitted(vogn(), own, max_epochs=1)
    assert callbacks_of(trainer, Calibration) == [own]


def loader(*columns):
    return DataLoader(TensorDataset(*columns), batch_size=16)


class Triples(Data):
    def val_dataloader(self):
        return loader(*VALIDATION.tensors, VALIDATION.tensors[1])


class Ignored(Data):
    """The first class is the padding, as ``ignore_index``."""

    def val_dataloader(self):
        return loader(VALIDATION.tensors[0], torch.where(VALIDATION.tensors[1] == 0, -100, VALIDATION.tensors[1]))


def named(data):
    return DataLoader(
        data, batch_size=16, collate_fn=lambda rows: dict(zip(("x", "labels"), default_collate(rows), strict=True))
    )


class Dictionaries(Data):
    def train_dataloader(self):
        return named(TRAIN)

    def val_dataloader(self):
        return named(VALIDATION)


class Named(Plain):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch["x"]), batch["labels"])


class Ragged(Data):
    def val_dataloader(self):
        return DataLoader(VALIDATION, 16, collate_fn=lambda rows: (*default_collate(rows), torch.zeros(3)))


class From1(Data):
    def val_dataloader(self):
        return loader(VALIDATION.tensors[0], VALIDATION.tensors[1] + 1)


class Shifts(Plain):
    """Classes in another order in the loss than in the data."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), (batch[1] + 1) % 3)


class Selects(Plain):
    """Scores the examples whose first input is positive."""

    def training_step(self, batch, batch_idx):
        kept = batch[0][:, 0] > 0
        return F.cross_entropy(self(batch[0])[kept], batch[1][kept])


class Two(Plain):
    """Two heads, each with a loss."""

    def forward(self, x):
        return self.net(x), self.net(-x)

    def training_step(self, batch, batch_idx):
        return sum(F.cross_entropy(each, batch[1]) for each in self(batch[0]))


class Unknown(Plain):
    def training_step(self, batch, batch_idx):
        return (self(batch[0]) - F.one_hot(batch[1], 3)).abs().pow(1.5).mean()


class Unforeseen(Plain):
    """Its forward takes no batch of validation in evaluation outside of steps."""

    def forward(self, x):
        if self.trainer.state.stage == "train" and not self.training:
            raise KeyError("no forward here")
        return super().forward(x)


SAID = {
    "ragged": (Plain, Ragged, r"the rows of its batches, each a tuple, are not known"),
    "two heads": (Two, Data, "the training loss scores several outputs"),
    "no labels": (Plain, From1, r"the targets are no labels of forward's outputs \[\d+, 3\]"),
    "unknown": (Unknown, Data, "the training loss does not tell how outputs become predictions"),
    "error": (Unforeseen, Data, "KeyError: 'no forward here'"),
}


class NoSteps:
    """Validation that calls nothing but the network."""

    def validation_step(self, batch, batch_idx):
        self(batch["x"] if isinstance(batch, dict) else batch[0])


@pytest.mark.parametrize("case", SAID)
def test_an_unknown_task_is_left_alone_in_one_line(case, caplog):
    module, data, reason = SAID[case]
    kind = type("Module", (NoSteps, module), {})
    with caplog.at_level("INFO"):
        trainer, _ = fitted(vogn(), module=kind(), data=data(), max_epochs=SHORT)
    (line,) = [record.getMessage() for record in caplog.records if "no temperature" in record.getMessage()]
    assert line.startswith("VOGNCallback chooses no temperature on the validation set: ")
    assert re.search(reason, line)
    assert (calibration_of(trainer).scale, calibration_of(trainer).temperature) == (None, 1.0)


READ = {  # and the targets and the rows that count
    "triples": (Plain, Triples, lambda x, y: (y, slice(None))),
    "ignored": (Plain, Ignored, lambda x, y: (y, y != 0)),
    "dictionaries": (Named, Dictionaries, lambda x, y: (y, slice(None))),
    "changed": (Shifts, Data, lambda x, y: ((y + 1) % 3, slice(None))),
    "selected": (Selects, Data, lambda x, y: (y, x[:, 0] > 0)),
}


@pytest.mark.filterwarnings("ignore:The loss does not show how it reduces")
@pytest.mark.parametrize("case", READ)
def test_targets_count_as_in_the_training_step(case):
    module, data, targets = READ[case]
    trainer, module = fitted(vogn(), module=type("Module", (NoSteps, module), {})(), data=data(), max_epochs=SHORT)
    x, y = VALIDATION.tensors
    labels, kept = targets(x, y)
    samples = PosteriorSamples(callbacks_of(trainer, VOGNCallback)[0].optimizer.posterior(), 3)
    with torch.no_grad():
        outputs = samples.outputs(module.eval(), lambda: module(x))
    expected = fit_temperature(outputs[:, kept], labels[kept], shrinkage=SHRINKAGE)
    assert calibration_of(trainer).temperature == pytest.approx(expected, rel=1e-3)
    assert expected != pytest.approx(1, abs=1e-3)


def test_a_single_validation_batch_changes_little():
    trainer, module = fitted(vogn(), max_epochs=SHORT, limit_val_batches=1)
    (x, y), *_ = batches(VALIDATION)
    samples = PosteriorSamples(callbacks_of(trainer, VOGNCallback)[0].optimizer.posterior(), S)
    with torch.no_grad():
        outputs = samples.outputs(module.eval(), lambda: module(x))
    temperature, fitted_alone = fit_temperature(outputs, y, shrinkage=SHRINKAGE), fit_temperature(outputs, y)
    assert calibration_of(trainer).temperature == pytest.approx(temperature, rel=1e-3)
    assert abs(math.log(temperature)) < 0.5 * abs(math.log(fitted_alone))


class Squares(Plain):
    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]), F.one_hot(batch[1], 3).float())


def test_regression_keeps_its_width(caplog):
    with caplog.at_level("INFO"):
        trainer, _ = fitted(vogn(), module=type("Module", (NoSteps, Squares), {})(), max_epochs=SHORT)
    assert calibration_of(trainer).scale is None
    assert "alibrat" not in caplog.text


# -- costs ------------------------------------------------------------------------------------------------------------


def test_calls_at_the_end_are_at_most_15_percent_of_the_batches():
    class Counts(Plain):
        calls = 0

        def forward(self, x):
            is_end = self.trainer.state.stage == "train" and not self.training
            self.calls += is_end
            return super().forward(x)

    trainer, module = fitted(vogn(), module=Counts(), max_epochs=SHORT)
    assert calibration_of(trainer).scale == 1
    assert 0 < module.calls <= 0.15 * SHORT * 3


def test_a_budget_counts_calls_and_rows():
    budget = Budget(calls=100, rows_of_batch=32)
    assert (budget.batches(9), budget.rows(9), budget.rows(9, 8)) == (10, 320, 40)  # one more for the network alone
    assert Budget(calls=100, rows_of_batch=32, others=300).rows(9) == 20


def test_kept_rows_are_spread_and_copied():
    kept = KeptRows()
    kept.start(4)
    rows = [(torch.full((1000, 2), float(i)), torch.full((1000,), i)) for i in range(4)]
    for index, batch in enumerate(rows):
        kept.add(batch, index)
    rows[0][0].zero_()
    rows[1][0].fill_(7.0)
    assert [rows_of(batch) for batch in kept.batches] == [500] * 4
    whole = merged(kept.batches, 1500)
    assert [rows_of(batch) for batch in whole] == [1500, 500]
    assert torch.cat([x[:, 0] for x, _ in whole]).tolist() == [float(i) for i in range(4) for _ in range(500)]
    ragged = [(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(2, 4), torch.zeros(2))]
    assert merged(ragged, 4) is ragged


def fit_on_ranks(rank):
    states = []
    for module, epochs in ((Plain(), EPOCHS), (normed(Plain), SHORT)):
        trainer = quiet_trainer(vogn(), max_epochs=epochs, devices=2, strategy="ddp")
        trainer.fit(module, batches(TRAIN), batches(VALIDATION))
        states.append(calibration_of(trainer).state_dict())
    return [states[0]["scale"], states[0]["temperature"], states[1]["input_means"]["net.1.running_mean"][1]]


@pytest.mark.ddp
def test_two_ranks_choose_the_same(tmp_path):
    first, second = run_on_ranks(fit_on_ranks, 2, tmp_path)
    assert first[:2] == second[:2]
    assert first[0] == 1
    assert first[1] > 1
    assert torch.equal(first[2], second[2])
