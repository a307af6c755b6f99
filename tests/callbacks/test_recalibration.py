"""BatchNorm recalibration in a Trainer, against mc_predict with the same batches by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from tiny_training import CLASSES, FEATURES, Classifier, blobs, loader, quiet_trainer, weights
from torch import nn

from lightning_bayes import BatchNormRecalibration, DeepEnsembleCallback, OGNCallback, VOGNCallback, mc_predict
from lightning_bayes.errors import HyperparameterError, UnsupportedTrainingError
from lightning_bayes.zoo import BayesClassifier

S = 4


class Data(LightningDataModule):
    def train_dataloader(self):
        return loader(8)

    def test_dataloader(self):
        return loader(16)

    val_dataloader = predict_dataloader = test_dataloader


def network():
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES))


@pytest.fixture
def task():
    torch.manual_seed(0)
    return BayesClassifier(network(), CLASSES)


@pytest.fixture
def vogn(task):
    callback = VOGNCallback(lr=0.05, init_precision=20.0, eval_samples=S)
    quiet_trainer(callback, num_sanity_val_steps=0).fit(task, datamodule=Data())
    return callback


def nll(prediction, targets):
    return F.nll_loss(prediction.probs.log(), targets).item()


def test_a_test_measures_recalibrated_samples_and_the_recalibrated_mean(task, vogn):
    before = weights(task)
    (found,) = quiet_trainer(vogn, BatchNormRecalibration(batches=3)).test(task, datamodule=Data(), verbose=False)
    inputs, targets = blobs().tensors
    posterior = vogn.optimizer.posterior().select("model.")
    first = [inputs[8 * k : 8 * k + 8] for k in range(3)]
    assert found["test/cls/NLL"] == pytest.approx(
        nll(mc_predict(task.model, posterior, inputs, S, recalibrate_on=first), targets), rel=1e-5
    )
    assert found["test/cls/NLL"] != pytest.approx(nll(mc_predict(task.model, posterior, inputs, S), targets), rel=1e-4)
    torch.optim.swa_utils.update_bn(first, task.model)
    task.eval()
    assert found["test_mean/cls/NLL"] == pytest.approx(F.cross_entropy(task(inputs), targets).item(), rel=1e-5)
    task.load_state_dict(before)


def test_the_module_is_the_same_afterwards_and_so_are_random_numbers(task, vogn):
    before, random = weights(task), []
    for extra in ([], [BatchNormRecalibration(batches=2)]):
        torch.manual_seed(3)
        quiet_trainer(vogn, *extra).predict(task, datamodule=Data())
        random.append(torch.get_rng_state())
    assert torch.equal(*random)
    assert all(torch.equal(value, before[name]) for name, value in weights(task).items())
    assert [layer.momentum for layer in task.modules() if isinstance(layer, nn.BatchNorm1d)] == [0.1]


def test_statistics_of_the_mean_for_all_samples(task, vogn):
    inputs, targets = blobs().tensors
    trainer = quiet_trainer(vogn, BatchNormRecalibration(batches=6, of="mean"))
    (found,) = trainer.test(task, datamodule=Data(), verbose=False)
    posterior = vogn.optimizer.posterior().select("model.")
    torch.optim.swa_utils.update_bn([inputs[8 * k : 8 * k + 8] for k in range(6)], task.model)
    posterior.constants.update({name: buffer.clone() for name, buffer in task.model.named_buffers()})
    expected = nll(mc_predict(task.model, posterior, inputs, S), targets)
    assert found["test/cls/NLL"] == pytest.approx(expected, rel=1e-5)


def test_update_bn_after_the_fit_gives_the_posterior_the_statistics_of_the_mean(task, vogn):
    """They are plain averages over the batches of the first layer's outputs at the mean."""
    inputs, targets = blobs().tensors
    before = nll(mc_predict(task.model, vogn.optimizer.posterior().select("model."), inputs, S), targets)
    batches = [inputs[8 * k : 8 * k + 8] for k in range(6)]
    torch.optim.swa_utils.update_bn(batches, task.model)
    posterior = vogn.optimizer.posterior().select("model.")
    hidden = torch.stack([task.model[0](batch).detach() for batch in batches])
    torch.testing.assert_close(posterior.constants["1.running_mean"], hidden.mean(1).mean(0))
    torch.testing.assert_close(posterior.constants["1.running_var"], hidden.var(1).mean(0))
    (found,) = quiet_trainer(vogn).test(task, datamodule=Data(), verbose=False)
    assert found["test/cls/NLL"] == pytest.approx(nll(mc_predict(task.model, posterior, inputs, S), targets), rel=1e-5)
    assert found["test/cls/NLL"] != pytest.approx(before, rel=1e-4)


@pytest.mark.filterwarnings(
    "ignore:Found 1 module.s. in eval mode:UserWarning"
)  # Lightning asks whether this is intended
def test_a_fit_keeps_the_statistics_of_a_batch_norm_in_evaluation_mode_and_normalises_by_them(task):
    norm, shift, variance, differences = task.model[1], 0.3, 2.0, []
    norm.running_mean.fill_(shift)
    norm.running_var.fill_(variance)
    norm.eval()

    @norm.register_forward_hook
    def compare(module, inputs, output):
        if task.training:
            kept = (inputs[0] - shift) / (variance + module.eps) ** 0.5 * module.weight + module.bias
            differences.append((output - kept).abs().max().item())

    callback = VOGNCallback(lr=0.05, init_precision=20.0, eval_samples=S)
    quiet_trainer(callback, max_epochs=2, num_sanity_val_steps=0).fit(task, datamodule=Data())
    assert len(differences) == 2 * 6
    assert max(differences) < 1e-5
    posterior = callback.optimizer.posterior().select("model.")
    for buffers in (dict(norm.named_buffers()), {k.removeprefix("1."): v for k, v in posterior.constants.items()}):
        torch.testing.assert_close(buffers["running_mean"], torch.full((6,), shift))
        torch.testing.assert_close(buffers["running_var"], torch.full((6,), variance))


def test_validation_within_a_fit_keeps_the_statistics_of_training(task):
    """The same fit with and without the callback, bit by bit, although it validates under samples."""
    results = []
    for extra in ([], [BatchNormRecalibration(batches=1)]):
        torch.manual_seed(0)
        module, callback = BayesClassifier(network(), CLASSES), VOGNCallback(eval_samples=S)
        trainer = quiet_trainer(callback, *extra, num_sanity_val_steps=0)
        trainer.fit(module, datamodule=Data())
        results.append((trainer.callback_metrics["val/cls/NLL"].item(), weights(module)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())


def test_batches_of_the_last_fit_without_a_data_module(task):
    callback = VOGNCallback(lr=0.05, init_precision=20.0, eval_samples=S)
    trainer = quiet_trainer(callback, BatchNormRecalibration(batches=6), num_sanity_val_steps=0)
    trainer.fit(task, loader(8), loader(16))
    (found,) = trainer.test(task, loader(16), verbose=False)
    inputs, targets = blobs().tensors
    batches = [inputs[8 * k : 8 * k + 8] for k in range(6)]
    posterior = callback.optimizer.posterior().select("model.")
    expected = nll(mc_predict(task.model, posterior, inputs, S, recalibrate_on=batches), targets)
    assert found["test/cls/NLL"] == pytest.approx(expected, rel=1e-5)


def test_by_default_as_many_batches_as_hold_enough_examples(task, vogn, monkeypatch):
    monkeypatch.setattr("lightning_bayes.callbacks.recalibration.EXAMPLES", 20)  # batches of 8
    by_default, three = (
        quiet_trainer(vogn, BatchNormRecalibration(**arguments)).test(task, datamodule=Data(), verbose=False)
        for arguments in ({}, {"batches": 3})
    )
    assert by_default == three


def test_members_of_an_ensemble(task, tmp_path):
    trainer = quiet_trainer()
    trainer.fit(task, datamodule=Data())
    trainer.save_checkpoint(tmp_path / "member.ckpt")
    ensemble = DeepEnsembleCallback([str(tmp_path / "member.ckpt")])
    (found,) = quiet_trainer(ensemble, BatchNormRecalibration(6)).test(task, datamodule=Data(), verbose=False)
    inputs, targets = blobs().tensors
    torch.optim.swa_utils.update_bn([inputs[8 * k : 8 * k + 8] for k in range(6)], task.model)
    task.eval()
    assert found["test/cls/NLL"] == pytest.approx(F.cross_entropy(task(inputs), targets).item(), rel=1e-5)


def test_without_training_batches_it_is_refused(task, vogn):
    with pytest.raises(
        UnsupportedTrainingError, match=r"needs training batches, but there was no fit with it.*add the callback"
    ):
        quiet_trainer(vogn, BatchNormRecalibration()).test(task, loader(16), verbose=False)


def test_a_point_estimate_is_told_what_to_do(task):
    callback = OGNCallback(lr=0.05)
    quiet_trainer(callback).fit(task, datamodule=Data())
    with pytest.warns(UserWarning, match=r"changed nothing: no callback averaged over samples.*update_bn"):
        quiet_trainer(callback, BatchNormRecalibration()).test(task, datamodule=Data(), verbose=False)


def test_a_model_without_batch_norm_is_named():
    module, callback = Classifier(), VOGNCallback(eval_samples=S)
    quiet_trainer(callback).fit(module, loader())
    with pytest.warns(UserWarning, match=r"no BatchNorm of Classifier has running statistics"):
        quiet_trainer(callback, BatchNormRecalibration()).predict(module, loader())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batches": 0}, r"batches=0 must be a whole number of at least 1"),
        ({"batches": 1.5}, r"batches=1\.5 must be a whole number"),
        ({"of": "layer"}, r"of='layer' is unknown; choose 'sample' or 'mean'"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(HyperparameterError, match=message):
        BatchNormRecalibration(**arguments)
