"""Rejection in a Trainer's test, against the threshold and counts computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from noisy_classes import TEST, TRAIN, VALIDATION, Data, batches
from tiny_training import CLASSES, Classifier, loader, mlp, quiet_trainer

from lightning_bayes import Calibration, RejectorCallback, VOGNCallback, mc_predict
from lightning_bayes.errors import HyperparameterError, UnsupportedTrainingError
from lightning_bayes.predictive import Rejector
from lightning_bayes.zoo import BayesClassifier

S, LENIENT = 4, {"risk": 0.2, "confidence": 0.8}


@pytest.fixture(scope="module")
def trained():
    """A classifier and its posterior."""
    module = BayesClassifier(mlp(), CLASSES, optimizer=lambda p: torch.optim.Adam(p, lr=5e-2))
    vogn = VOGNCallback(eval_samples=S, relative_noise=0.5)
    quiet_trainer(vogn, max_epochs=10).fit(module, datamodule=Data())
    return module, vogn


def test_the_threshold_is_that_of_the_validation_set_and_the_test_counts_its_answers(trained):
    module, vogn = trained
    rejector = RejectorCallback(**LENIENT)
    trainer = quiet_trainer(vogn, rejector)
    (logged,) = trainer.test(module, datamodule=Data(), verbose=False)
    (calibration,) = (each for each in trainer.callbacks if isinstance(each, Calibration))
    posterior = calibration.scaled(vogn.optimizer.posterior())  # at the temperature that the fit has chosen
    assert posterior.temperature != 1
    on_validation, on_test = (mc_predict(module, posterior, each.tensors[0], S).probs for each in (VALIDATION, TEST))
    by_hand = Rejector.fit(on_validation, VALIDATION.tensors[1], **LENIENT)
    answers = on_test.max(1).values > by_hand.threshold
    wrong = on_test.argmax(1)[answers] != TEST.tensors[1][answers]
    assert 0 < answers.sum() < len(answers)  # else the counts would say nothing
    assert logged["test/reject/threshold"] == pytest.approx(by_hand.threshold, rel=1e-5)
    assert logged["test/reject/coverage"] == pytest.approx(answers.double().mean().item())
    assert logged["test/reject/error"] == pytest.approx(wrong.double().mean().item())
    assert rejector.rejector.state_dict() == pytest.approx(by_hand.state_dict(), rel=1e-5)


def test_without_a_data_module_the_loaders_of_the_fit_are_used():
    module, callback = BayesClassifier(mlp(), CLASSES), RejectorCallback(**LENIENT)
    module.configure_optimizers = lambda: torch.optim.Adam(module.parameters(), lr=5e-2)
    trainer = quiet_trainer(callback, max_epochs=10)
    trainer.fit(module, batches(TRAIN), batches(VALIDATION))
    with torch.no_grad():
        probs = module.eval()(VALIDATION.tensors[0]).softmax(1)
    (logged,) = trainer.test(module, batches(TEST), verbose=False)
    expected = Rejector.fit(probs, VALIDATION.tensors[1], **LENIENT).threshold
    assert logged["test/reject/threshold"] == pytest.approx(expected, rel=1e-5)


def test_where_no_threshold_keeps_the_risk_the_test_goes_on(trained):
    module, vogn = trained
    callback = RejectorCallback(risk=0.001)
    with pytest.warns(
        UserWarning, match=r"The test continues without rejection. No threshold guarantees a risk of 0.001"
    ):
        (logged,) = quiet_trainer(vogn, callback).test(module, datamodule=Data(), verbose=False)
    assert callback.rejector is None
    assert not any(key.startswith("test/reject/") for key in logged)
    assert "test/cls/Acc" in logged


class WithTestStep(Classifier):
    def test_step(self, batch, batch_idx):
        return {"outputs": self(batch[0]), "targets": batch[1]}


def test_a_module_without_samples_of_its_forward_is_refused():
    with pytest.raises(
        UnsupportedTrainingError, match=r"calls the module's sampled_forward, but WithTestStep has none"
    ):
        quiet_trainer(RejectorCallback()).test(WithTestStep(), loader(), verbose=False)


def test_several_processes_are_refused(trained):
    with pytest.raises(UnsupportedTrainingError, match=r"this trainer has 2. Test with Trainer\(devices=1\)"):
        RejectorCallback().on_test_epoch_start(SimpleNamespace(world_size=2), trained[0])


@pytest.mark.parametrize("arguments", [{"risk": 0.0}, {"risk": 1}, {"confidence": 1.0}])
def test_numbers_outside_of_0_and_1_are_refused(arguments):
    with pytest.raises(HyperparameterError, match="must lie between 0 and 1"):
        RejectorCallback(**arguments)
