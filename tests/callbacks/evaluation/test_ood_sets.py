"""OOD metrics of a user's own module and data module, against torchmetrics on predictions by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from tiny_training import Classifier, quiet_trainer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import binary_auroc

from lightning_bayes import DeepEnsembleCallback, VOGNCallback, mc_predict
from lightning_bayes.errors import HyperparameterError


class OwnModule(Classifier):
    """Evaluates labels only where there are any."""

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        logits = self(batch[0])
        if dataloader_idx == 0:
            self.log("test/loss", F.cross_entropy(logits, batch[1]), add_dataloader_idx=False)


class Data(LightningDataModule):
    """A test set and two sets without labels."""

    def __init__(self, names=("far", "near")):
        super().__init__()
        self.ood_names = names
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(40, 4, generator=generator)
        self.test = TensorDataset(x, (x[:, 0] > 0).long())
        self.far, self.near = (TensorDataset(scale * torch.randn(24, 4, generator=generator)) for scale in (9.0, 0.2))

    def train_dataloader(self):
        return DataLoader(self.test, batch_size=8)

    def test_dataloader(self):
        return [DataLoader(data, batch_size=7) for data in (self.test, self.far, self.near)]


def results_of(data, callback, module=None):
    module, trainer = module or OwnModule(), quiet_trainer(callback, max_epochs=2)
    trainer.fit(module, datamodule=data)
    return trainer.test(module, datamodule=data, verbose=False), module


def test_the_metrics_are_those_of_predictions_by_hand():
    data, callback = Data(), VOGNCallback(relative_noise=0.5, eval_samples=6)
    results, module = results_of(data, callback)
    posterior = callback.optimizer.posterior()
    found = [mc_predict(module, posterior, part.tensors[0], 6) for part in (data.test, data.far, data.near)]
    for score in ("entropy", "mutual_information"):
        inside, far, near = (getattr(prediction, score) for prediction in found)
        for name, outside in (("far", far), ("near", near)):
            target = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).long()
            expected = binary_auroc(torch.cat([inside, outside]).sigmoid(), target).item()
            assert results[-1][f"ood/{name}/{score}/AUROC"] == pytest.approx(expected, abs=0.02)
    assert 0 <= results[-1]["ood/AUROC"] <= 1


def test_every_value_stands_under_its_own_loader():
    results, _ = results_of(Data(), VOGNCallback(relative_noise=0.5))
    of_test, *of_ood = ({key.split("/")[0] for key in result} for result in results)
    assert "test_diff" in of_test
    assert "test_diff" not in set.union(*of_ood)
    assert ["ood" in keys for keys in (of_test, *of_ood)] == [False, False, True]


def test_an_ensemble_logs_them_too():
    results, _ = results_of(Data(), DeepEnsembleCallback(2))
    assert {"ood/AUROC", "ood/far/mutual_information/AUROC"} <= results[-1].keys()


def test_names_without_a_loader_are_refused():
    with pytest.raises(
        HyperparameterError, match=r"Data\.ood_names is \['a', 'b', 'c'\], but test_dataloader returns 2 loaders"
    ):
        results_of(Data(("a", "b", "c")), VOGNCallback())


class SkipsOthers(OwnModule):
    def test_step(self, batch, batch_idx, dataloader_idx=0):
        if dataloader_idx == 0:
            super().test_step(batch, batch_idx)


def test_a_step_that_skips_a_set_is_told():
    with pytest.warns(
        UserWarning, match=r"SkipsOthers\.test_step has no logits .* for far, near, so ood/\.\.\. is not logged"
    ):
        results_of(Data(), VOGNCallback(), SkipsOthers())
