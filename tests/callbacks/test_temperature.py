"""Temperature scaling in a Trainer, against a fit by hand over the same samples."""

from __future__ import annotations

import logging

import pytest
import torch
from distributed import run_on_ranks
from noisy_classes import TEST, TRAIN, VALIDATION, Data, batches
from scipy.optimize import minimize_scalar
from tiny_training import CLASSES, Classifier, ValidatedClassifier, loader, mlp, quiet_trainer
from torch.utils.data import TensorDataset

from lightning_bayes import VOGNCallback
from lightning_bayes.callbacks import PredictionWriter, TemperatureScaling
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.predictive import PosteriorSamples
from lightning_bayes.zoo import BayesClassifier

S = 4


def classifier():
    return BayesClassifier(mlp(), CLASSES, optimizer=lambda p: torch.optim.Adam(p, lr=5e-2))


def fitted(*callbacks, **kwargs):
    module, trainer = classifier(), quiet_trainer(*callbacks, **{"max_epochs": 2, **kwargs})
    trainer.fit(module, datamodule=Data())
    return module, trainer


@torch.no_grad()
def outputs_by_hand(module, posterior, dataset):
    module.eval()
    if posterior is None:
        return module(dataset.tensors[0]).unsqueeze(0)
    samples = PosteriorSamples(posterior, S, seed=0)
    each = [torch.func.functional_call(module, samples.weights(k), (dataset.tensors[0],)) for k in range(S)]
    return torch.stack(each)


def nll(outputs, dataset, temperature):
    probs = (outputs.double() / temperature).softmax(-1).mean(0)
    return -probs[torch.arange(len(probs)), dataset.tensors[1]].log().mean().item()


def best_temperature(outputs, dataset):
    bounded = {"bounds": (0.05, 20), "method": "bounded", "options": {"xatol": 1e-9}}
    return float(minimize_scalar(lambda t: nll(outputs, dataset, t), **bounded).x)


@pytest.mark.parametrize("sampled", [False, True], ids=["a point", "a sampled posterior"])
def test_the_last_validation_gives_the_temperature_and_a_test_uses_it(sampled):
    vogn = VOGNCallback(eval_samples=S, relative_noise=0.5)
    scaling = TemperatureScaling()
    module, trainer = fitted(*([vogn] if sampled else []), scaling)
    posterior = vogn.optimizer.posterior() if sampled else None
    expected = best_temperature(outputs_by_hand(module, posterior, VALIDATION), VALIDATION)
    assert trainer.callback_metrics["val/temperature"].item() == pytest.approx(expected, rel=1e-3)
    assert abs(expected - 1) > 1e-3  # it does something
    (found,) = trainer.test(module, datamodule=Data(), verbose=False)
    outputs = outputs_by_hand(module, posterior, TEST)
    assert found["test/post/temperature"] == pytest.approx(expected, rel=1e-3)
    assert found["test/post/cls/NLL"] == pytest.approx(nll(outputs, TEST, expected), rel=1e-3)
    assert found["test/cls/NLL"] == pytest.approx(nll(outputs, TEST, 1.0), rel=1e-4)
    assert module.lightning_bayes_temperature is None


def test_scaling_lowers_the_nll_of_the_validation_set():
    module, _ = fitted(TemperatureScaling())
    outputs = outputs_by_hand(module, None, VALIDATION)
    assert nll(outputs, VALIDATION, best_temperature(outputs, VALIDATION)) < nll(outputs, VALIDATION, 1.0) - 1e-3


def test_the_checkpoint_keeps_the_temperature_of_its_weights(tmp_path, caplog):
    vogn = VOGNCallback(eval_samples=S)
    module, trainer = fitted(vogn, TemperatureScaling())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    (first,) = trainer.test(module, datamodule=Data(), verbose=False)
    fresh = TemperatureScaling()
    host = quiet_trainer(VOGNCallback(eval_samples=S), fresh)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        (second,) = host.test(classifier(), batches(TEST), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert fresh.temperature == trainer.callbacks[1].temperature
    assert second["test/post/cls/NLL"] == pytest.approx(first["test/post/cls/NLL"], rel=1e-5)
    assert "was fitted" not in caplog.text  # not fitted again


# Lightning warns that the file was written without the callback.
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
def test_a_checkpoint_without_a_temperature_is_fitted_before_the_test(tmp_path):
    vogn = VOGNCallback(eval_samples=S)
    module, trainer = fitted(vogn)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    expected = best_temperature(outputs_by_hand(module, vogn.optimizer.posterior(), VALIDATION), VALIDATION)
    orders = [VOGNCallback(eval_samples=S), TemperatureScaling()], [TemperatureScaling(), VOGNCallback(eval_samples=S)]
    for callbacks in orders:
        host = quiet_trainer(*callbacks)
        (found,) = host.test(classifier(), datamodule=Data(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
        assert found["test/post/temperature"] == pytest.approx(expected, rel=1e-3)
        assert not any(key.startswith("val/") for key in found)


def test_refit_does_not_trust_the_checkpoint(tmp_path):
    _, trainer = fitted(VOGNCallback(eval_samples=S, relative_noise=0.5), TemperatureScaling())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    kept, refitted = TemperatureScaling(), TemperatureScaling(refit=True)
    for scaling in (kept, refitted):
        host = quiet_trainer(VOGNCallback(eval_samples=0), scaling)  # the mean has another temperature
        host.test(classifier(), datamodule=Data(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert refitted.temperature != pytest.approx(kept.temperature, rel=1e-3)


def test_a_temperature_of_earlier_weights_is_not_kept():
    scaling = TemperatureScaling()
    fitted(scaling, max_epochs=6, check_val_every_n_epoch=4)  # two epochs after the validation
    assert scaling.state_dict() == {"temperature": None}


@pytest.mark.parametrize(
    ("refit", "settings"),
    [(True, {"max_epochs": 2}), (False, {"max_epochs": 3, "check_val_every_n_epoch": 2})],
    ids=["asked to fit again", "the last epoch was not validated"],
)
def test_a_test_after_a_fit_on_loaders_uses_the_validation_set_of_the_fit(refit, settings):
    module, trainer = classifier(), quiet_trainer(TemperatureScaling(refit=refit), **settings)
    trainer.fit(module, batches(TRAIN), batches(VALIDATION))
    expected = best_temperature(outputs_by_hand(module, None, VALIDATION), VALIDATION)
    (found,) = trainer.test(module, batches(TEST), verbose=False)
    assert found["test/post/temperature"] == pytest.approx(expected, rel=1e-3)


def test_a_fit_again_uses_the_set_that_was_validated_last():
    module, trainer = classifier(), quiet_trainer(TemperatureScaling(refit=True), max_epochs=1)
    trainer.fit(module, batches(TRAIN), batches(VALIDATION))
    trainer.validate(module, batches(TRAIN), verbose=False)
    expected = best_temperature(outputs_by_hand(module, None, TRAIN), TRAIN)
    (found,) = trainer.test(module, batches(TEST), verbose=False)
    assert found["test/post/temperature"] == pytest.approx(expected, rel=1e-3)


def test_predictions_are_scaled(tmp_path):
    vogn = VOGNCallback(eval_samples=S)
    for callbacks in ([vogn], []):
        scaling, writer = TemperatureScaling(), PredictionWriter(str(tmp_path))
        module, trainer = fitted(*callbacks, scaling, writer)
        trainer.predict(module, datamodule=Data())
        table = torch.load(tmp_path / "predictions.pt", weights_only=True)
        outputs = outputs_by_hand(module, vogn.optimizer.posterior() if callbacks else None, TEST)
        torch.testing.assert_close(table["probs"], (outputs / scaling.temperature).softmax(-1).mean(0))
        assert module.lightning_bayes_temperature is None


@pytest.mark.filterwarnings("ignore:Total length of .list. across ranks is zero")  # Lightning's remark on an empty list
def test_without_a_validation_set_it_is_refused():
    class Unvalidated(Data):
        def val_dataloader(self):
            return []

    with pytest.raises(
        UnsupportedTrainingError, match=r"on a validation set, but this fit has none\. Hold out some training"
    ):
        quiet_trainer(TemperatureScaling()).fit(classifier(), datamodule=Unvalidated())
    message = r"but Unvalidated\.val_dataloader\(\) returns none\..*the test set is never used"
    with pytest.raises(UnsupportedTrainingError, match=message):
        quiet_trainer(TemperatureScaling()).test(classifier(), datamodule=Unvalidated(), verbose=False)
    with pytest.raises(UnsupportedTrainingError, match="but this callback has seen none"):
        quiet_trainer(TemperatureScaling()).test(classifier(), batches(TEST), verbose=False)


def test_modules_that_hide_their_logits_are_refused():
    trainer = quiet_trainer(TemperatureScaling(), max_epochs=1)
    message = r"ValidatedClassifier\.validation_step returned a NoneType without logits\. Return \{\"outputs\""
    with pytest.raises(UnsupportedTrainingError, match=message):
        trainer.fit(ValidatedClassifier(), loader(), loader())

    class Tested(Classifier):
        def test_step(self, batch, batch_idx):
            self(batch[0])

    with pytest.raises(UnsupportedTrainingError, match="its sampled_forward, but Tested lacks them"):
        quiet_trainer(TemperatureScaling()).test(Tested(), loader(), verbose=False)


def test_a_temperature_at_a_bound_is_warned_about():
    module = classifier()
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
        module.model[-1].bias[0] = 3.0  # class 0 for sure
    always = TensorDataset(VALIDATION.tensors[0], torch.zeros(60, dtype=torch.long))

    class Easy(Data):
        def val_dataloader(self):
            return batches(always)

    with pytest.warns(UserWarning, match=r"temperature 0\.05 is at the end of the search range.*does not determine it"):
        quiet_trainer(TemperatureScaling()).test(module, datamodule=Easy(), verbose=False)


def fit_on_ranks(rank):
    scaling = TemperatureScaling()
    module = classifier()
    trainer = quiet_trainer(
        VOGNCallback(eval_samples=S), scaling, max_epochs=2, devices=2, strategy="ddp", use_distributed_sampler=True
    )
    trainer.fit(module, batches(TRAIN), batches(VALIDATION))
    posterior = trainer.callbacks[0].optimizer.posterior()
    whole = best_temperature(outputs_by_hand(module, posterior, VALIDATION), VALIDATION)
    return [scaling.temperature, whole]


@pytest.mark.ddp
def test_two_ranks_fit_the_temperature_of_the_whole_validation_set(tmp_path):
    (first, whole), (second, _) = run_on_ranks(fit_on_ranks, 2, tmp_path)
    assert first == second
    assert first == pytest.approx(whole, rel=1e-3)
