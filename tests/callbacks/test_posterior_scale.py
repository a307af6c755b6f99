"""PosteriorScale in a Trainer, against a search by hand over the same samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from distributed import run_on_ranks
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from noisy_classes import TEST, TRAIN, VALIDATION, Data, batches
from tiny_training import CLASSES, FEATURES, Classifier, mlp, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import MCDropoutCallback, VOGNCallback, load_posterior, mc_predict
from lightning_bayes.callbacks import BatchNormRecalibration, PosteriorScale, TemperatureScaling
from lightning_bayes.callbacks.recalibration import recalibrated
from lightning_bayes.cli import instantiate
from lightning_bayes.errors import HyperparameterError, PosteriorError, UnsupportedTrainingError
from lightning_bayes.posteriors import ScaledPosterior
from lightning_bayes.predictive import LinearizedSamples, PosteriorSamples, fit_scale, predictive_nll
from lightning_bayes.zoo import BayesClassifier, BayesRegressor

S = 4


class Plain(Classifier):
    """A user's module, whose steps return nothing."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))


def adam(params):
    return torch.optim.Adam(params, lr=5e-2)


def plain():
    return Plain(lambda module: adam(module.parameters()))


def vogn(**kwargs):
    return VOGNCallback(**{"eval_samples": S, "relative_noise": 0.1, **kwargs})


def fitted(*callbacks, module=None, **kwargs):
    module, trainer = (
        module or plain(),
        quiet_trainer(*callbacks, **{"max_epochs": 60, **kwargs}),
    )  # until the mean is overconfident
    trainer.fit(module, datamodule=Data())
    return module, trainer


@torch.no_grad()
def outputs_by_hand(module, posterior, scale, dataset, linearized):
    module.eval()
    samples = PosteriorSamples(ScaledPosterior(posterior, scale), S, seed=0)
    samples = LinearizedSamples(samples) if linearized else samples
    return samples.outputs(module, lambda: module(dataset.tensors[0]))


def by_hand(module, posterior, linearized=False, dataset=VALIDATION, link="softmax", **noise):
    return fit_scale(
        lambda c: predictive_nll(
            outputs_by_hand(module, posterior, c, dataset, linearized), dataset.tensors[1], link, **noise
        )
    )


@pytest.mark.parametrize("linearized", [False, True])
@pytest.mark.parametrize("order", [1, -1], ids=["before", "after"])
def test_a_fit_ends_with_the_width_of_the_lowest_nll_and_a_test_uses_it(linearized, order):
    callback, scaling = vogn(linearized=linearized), PosteriorScale()
    module, trainer = fitted(*[callback, scaling][::order], max_epochs=200)  # until a wider posterior clearly helps
    posterior = callback.optimizer.posterior()
    expected = by_hand(module, posterior, linearized)
    assert scaling.scale == pytest.approx(expected.scale, rel=0.02)
    assert trainer.callback_metrics["val/posterior_scale"].item() == pytest.approx(expected.scale, rel=0.02)
    assert expected.nll <= expected.nll_of_mean
    assert 0 < expected.scale != 1
    (found,) = trainer.test(module, datamodule=Data(), verbose=False)
    outputs = outputs_by_hand(module, posterior, scaling.scale, TEST, linearized)
    assert found["test_loss"] == pytest.approx(predictive_nll(outputs, TEST.tensors[1], "softmax"), rel=1e-4)
    predicted = torch.cat([each["probs"] for each in trainer.predict(module, datamodule=Data())])
    torch.testing.assert_close(predicted, outputs.softmax(-1).mean(0))


# Lightning warns that the test has no ModelCheckpoint, and that the other one has no callback for the width.
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.parametrize("linearized", [False, True])
def test_the_checkpoint_keeps_the_width_and_load_posterior_returns_it(tmp_path, linearized):
    callback, scaling = vogn(linearized=linearized), PosteriorScale()
    saved = ModelCheckpoint(tmp_path, filename="last")
    module, trainer = fitted(callback, scaling, saved, enable_checkpointing=True)
    (first,) = trainer.test(module, datamodule=Data(), verbose=False)
    fresh = PosteriorScale()
    host = quiet_trainer(vogn(linearized=linearized), fresh)
    (second,) = host.test(plain(), batches(TEST), ckpt_path=tmp_path / "last.ckpt", verbose=False)  # no validation set
    assert fresh.scale == scaling.scale
    assert second["test_loss"] == pytest.approx(first["test_loss"], rel=1e-5)
    posterior = load_posterior(tmp_path / "last.ckpt")
    assert (posterior.scale, posterior.linearized) == (scaling.scale, linearized)
    x, y = TEST.tensors
    probs = mc_predict(module.net, posterior.select("net."), x, S).probs
    assert F.nll_loss(probs.log(), y).item() == pytest.approx(first["test_loss"], rel=1e-4)
    of_fit = scaling.scaled(callback.optimizer.posterior()).select("net.")
    torch.testing.assert_close(mc_predict(module.net, of_fit, x, S).probs, probs)


# Lightning warns that the file was written without the callback.
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
def test_a_width_that_is_missing_or_of_another_predictive_is_chosen_before_the_test(tmp_path):
    callback = vogn()
    module, trainer = fitted(callback)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    posterior = callback.optimizer.posterior()
    missing = PosteriorScale()
    quiet_trainer(vogn(), missing).test(plain(), datamodule=Data(), ckpt_path=tmp_path / "plain.ckpt", verbose=False)
    assert missing.scale == pytest.approx(by_hand(module, posterior).scale, rel=0.02)
    asked = PosteriorScale(linearized=True)
    asked.load_state_dict({"scale": 7.0, "linearized": False})
    quiet_trainer(vogn(), asked).test(plain(), datamodule=Data(), ckpt_path=tmp_path / "plain.ckpt", verbose=False)
    assert asked.scale == pytest.approx(by_hand(module, posterior, linearized=True).scale, rel=0.02)


def test_a_resumed_fit_discards_the_width_of_earlier_weights_and_chooses_again(tmp_path):
    scaling = PosteriorScale()
    _, trainer = fitted(vogn(), scaling)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, *args):
            seen.append(again.scale)

    callback, again = vogn(), PosteriorScale()
    host = quiet_trainer(callback, again, Watch(), max_epochs=61)
    resumed = plain()
    host.fit(resumed, datamodule=Data(), ckpt_path=tmp_path / "last.ckpt")
    assert set(seen) == {None}
    assert again.scale == pytest.approx(by_hand(resumed, callback.optimizer.posterior()).scale, rel=0.02)


def test_choosing_leaves_weights_modes_and_random_numbers_alone():
    runs = []
    for extra in ([], [PosteriorScale()]):
        torch.manual_seed(0)
        module, _ = fitted(vogn(), *extra)
        runs.append([*(p.detach().clone() for p in module.parameters()), torch.get_rng_state()])
        assert module.training
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize("noise", ["stated", "unknown"])
def test_regression_has_the_noise_that_the_module_states_or_the_best_one(noise):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(80, FEATURES, generator=generator)
    y = x[:, :1] + 0.3 * torch.randn(80, 1, generator=generator)
    data = TensorDataset(x, y)

    class Mse(Plain):
        def training_step(self, batch, batch_idx):
            return F.mse_loss(self(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            self(batch[0])

    net = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1))
    stated = BayesRegressor(net, adam, noise_std=0.3)
    module = stated if noise == "stated" else Mse(lambda m: adam(m.parameters()), net)
    callback, scaling = vogn(relative_noise=0.2), PosteriorScale()
    quiet_trainer(callback, scaling, max_epochs=3).fit(module, batches(data), batches(data))
    std = {"noise_std": 0.3} if noise == "stated" else {}
    expected = by_hand(module, callback.optimizer.posterior(), dataset=data, link="identity", **std)
    assert scaling.scale == pytest.approx(expected.scale, rel=0.02)


def test_a_posterior_that_only_harms_becomes_the_mean():
    """The best prediction is the constant class frequencies, so noise in the weights cannot help."""
    module = plain()
    for p in module.parameters():
        p.data.zero_()
    x = torch.randn(300, FEATURES, generator=torch.Generator().manual_seed(0))
    flat = DataLoader(TensorDataset(x, torch.arange(300) % CLASSES), batch_size=100)
    callback, scaling = vogn(init_precision=4.0, lr=1e-9, relative_noise=None), PosteriorScale()
    trainer = quiet_trainer(callback, scaling)
    trainer.fit(module, flat, flat)
    assert scaling.scale == 0
    (found,) = trainer.test(module, flat, verbose=False)
    assert found["test_loss"] == pytest.approx(torch.tensor(3.0).log().item(), rel=1e-5)
    predicted = torch.cat([each["mutual_information"] for each in trainer.predict(module, flat)])
    assert predicted.abs().max() < 1e-6


def test_beside_temperature_scaling_the_temperature_is_that_of_the_chosen_width():
    callback, scaling, temperature = vogn(), PosteriorScale(), TemperatureScaling()
    module = BayesClassifier(mlp(), CLASSES, optimizer=adam)
    module, trainer = fitted(callback, scaling, temperature, module=module)
    (found,) = trainer.test(module, datamodule=Data(), verbose=False)
    outputs = outputs_by_hand(module, callback.optimizer.posterior(), scaling.scale, VALIDATION, False)
    nll = [predictive_nll(outputs / t, VALIDATION.tensors[1], "softmax") for t in (found["test/post/temperature"], 1.0)]
    around = [found["test/post/temperature"] * factor for factor in (0.98, 1.02)]
    assert nll[0] < min(predictive_nll(outputs / t, VALIDATION.tensors[1], "softmax") for t in around)


@pytest.mark.parametrize(("of", "evaluations"), [("sample", 13), ("mean", 2)])
def test_recalibrated_statistics_belong_to_the_prediction_whose_width_is_chosen(of, evaluations, monkeypatch):
    """Sampled: at least the mean and each grid point. Linearised: two widths, which determine all others."""
    seen = []

    def recorded(trainer, module, samples):
        found = recalibrated(trainer, module, samples)
        seen.append(found is not samples)
        return found

    net = nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES))
    scaling = PosteriorScale(refit=True, linearized=of == "mean")
    module, trainer = fitted(
        vogn(), scaling, BatchNormRecalibration(2, of=of), module=Plain(adam_of, net), max_epochs=2
    )
    monkeypatch.setattr("lightning_bayes.callbacks.chosen_posterior.recalibrated", recorded)
    trainer.test(module, datamodule=Data(), verbose=False)
    assert all(seen)
    assert len(seen) >= evaluations
    assert of == "sample" or len(seen) == evaluations


def adam_of(module):
    return adam(module.parameters())


def test_linearised_samples_with_statistics_of_their_own_are_refused():
    net = nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES))
    module, trainer = fitted(vogn(linearized=True), BatchNormRecalibration(2), module=Plain(adam_of, net))
    with pytest.raises(HyperparameterError, match=r"expansions of one network.*of='mean'"):
        trainer.test(module, datamodule=Data(), verbose=False)


def test_what_has_no_width_is_refused():
    with pytest.raises(UnsupportedTrainingError, match=r"no callback of this trainer has one\. Add VOGNCallback"):
        fitted(PosteriorScale())
    dropout = MCDropoutCallback(eval_samples=2, p=0.1, layers=r"net\.0")
    with pytest.raises(UnsupportedTrainingError, match="but DropoutSamples have none"):
        fitted(dropout, PosteriorScale())
    with pytest.raises(UnsupportedTrainingError, match="fits its width on a validation set, but this fit has none"):
        quiet_trainer(vogn(), PosteriorScale()).fit(Classifier(), batches(TRAIN))
    with pytest.raises(PosteriorError, match="has not chosen a width"):
        PosteriorScale().scaled(None)


def test_batches_that_are_no_pairs_are_refused():
    class Triple(Plain):
        def validation_step(self, batch, batch_idx):
            self(batch[0])

    triples = DataLoader(TensorDataset(*VALIDATION.tensors, VALIDATION.tensors[1]), batch_size=16)
    with pytest.raises(
        UnsupportedTrainingError, match=r"\(inputs, targets\), but the validation set yields a list.*fit_sc"
    ):
        quiet_trainer(vogn(), PosteriorScale()).fit(Triple(adam_of), batches(TRAIN), triples)


def fit_on_ranks(rank):
    scaling = PosteriorScale()
    trainer = quiet_trainer(vogn(), scaling, max_epochs=2, devices=2, strategy="ddp", use_distributed_sampler=True)
    trainer.fit(plain(), batches(TRAIN), batches(VALIDATION))
    whole = by_hand(trainer.lightning_module, trainer.callbacks[0].optimizer.posterior())
    return [scaling.scale, whole.scale]


@pytest.mark.ddp
def test_two_ranks_choose_the_width_for_the_whole_validation_set(tmp_path):
    (first, whole), (second, _) = run_on_ranks(fit_on_ranks, 2, tmp_path)
    assert first == second
    assert first == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize("more", [[], ["--trainer.callbacks.linearized=true"]], ids=["sampled", "linearised"])
def test_from_the_command_line(more):
    run = instantiate("digits+mlp+vogn+posterior_scale", "--trainer.accelerator=cpu", "--trainer.logger=false", *more)
    kinds = [type(callback).__name__ for callback in run.trainer.callbacks]
    assert {"PosteriorScale", "VOGNCallback"} <= set(kinds)
    found = [callback for callback in run.trainer.callbacks if isinstance(callback, VOGNCallback)]
    assert found[0].linearized == bool(more)
