"""A single test of the zoo's classifier measures the Monte-Carlo predictive and the posterior mean."""

from __future__ import annotations

import pytest
import torch
from posterior_around import outputs_of_samples
from sklearn.metrics import log_loss, roc_auc_score
from tiny_training import CLASSES, FEATURES, loader, mlp, quiet_trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import DeepEnsembleCallback, OGNCallback, VOGNCallback
from lightning_bayes.metrics import classification_metrics
from lightning_bayes.predictive import ood_scores
from lightning_bayes.zoo import BayesClassifier

S = 5
pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader.")


def classifier():
    return BayesClassifier(mlp(), CLASSES, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2))


def outside():
    inputs = 3 * torch.randn(20, FEATURES, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(inputs, torch.full((20,), -1)), batch_size=8)


def evaluated(callback, loaders, **kwargs):
    """Metrics of a test after a short fit, the module and its posterior."""
    module, trainer = classifier(), quiet_trainer(callback, max_epochs=2, **kwargs)
    trainer.fit(module, loader())
    rows = trainer.test(module, loaders, verbose=False)
    return {key: value for row in rows for key, value in row.items()}, module, callback.optimizer.posterior()


@torch.no_grad()
def by_hand(module, posterior, inputs):
    """Logits under each sample, [S, batch, classes], and at the mean, [batch, classes]."""
    return torch.stack(outputs_of_samples(module, posterior, inputs, S)), module(inputs)


def truth(prefix, probs, targets):
    metrics = classification_metrics(CLASSES, prefix)
    metrics.update(probs, targets)
    return {key: value.item() for key, value in metrics.compute().items()}


def assert_contains(found, expected):
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), key


def test_metrics_of_samples_and_mean_are_those_of_both_predictions():
    found, module, posterior = evaluated(VOGNCallback(eval_samples=S, relative_noise=0.5), loader())
    inputs, targets = loader().dataset.tensors
    samples, mean = by_hand(module, posterior, inputs)
    assert_contains(found, truth("test/", samples.softmax(-1).mean(0), targets))
    assert_contains(found, truth("test_mean/", mean.softmax(-1), targets))
    assert found["test/cls/NLL"] != pytest.approx(found["test_mean/cls/NLL"], rel=1e-3)
    assert found["test_mean/cls/NLL"] == pytest.approx(log_loss(targets, mean.double().softmax(-1)), rel=1e-5)


def test_inputs_out_of_distribution_are_scored_under_samples_and_mean():
    found, module, posterior = evaluated(VOGNCallback(eval_samples=S, relative_noise=0.5), [loader(), outside()])
    inside, others = loader().dataset.tensors[0], outside().dataset.tensors[0]
    labels = torch.arange(len(inside) + len(others)) >= len(inside)
    samples, mean = by_hand(module, posterior, torch.cat([inside, others]))
    for room, outputs in (("ood", samples), ("ood_mean", mean)):
        for score, values in ood_scores(outputs).items():
            expected = roc_auc_score(labels, values)
            assert found[f"{room}/set1/{score}/AUROC"] == pytest.approx(expected, abs=2e-3), (room, score)
    assert "ood_mean/set1/mutual_information/AUROC" not in found
    assert found["ood_mean/AUROC"] == found["ood_mean/set1/entropy/AUROC"]


@pytest.mark.parametrize("callback", [VOGNCallback(eval_samples=0), OGNCallback(eval_samples=S)], ids=["S=0", "OGN"])
def test_without_samples_there_is_only_the_mean(callback):
    found, module, _ = evaluated(callback, [loader(), outside()])
    inputs, targets = loader().dataset.tensors
    with torch.no_grad():
        mean = module.eval()(inputs)
    assert_contains(found, truth("test/", mean.softmax(-1), targets))
    assert not any(key.startswith(("test_mean", "ood_mean")) or "mutual_information" in key for key in found)


def test_an_ensemble_has_a_mutual_information_but_no_mean(tmp_path):
    paths = [tmp_path / f"{seed}.ckpt" for seed in range(2)]
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        module = BayesClassifier(mlp(seed), CLASSES)
        trainer = quiet_trainer()
        trainer.fit(module, loader())
        trainer.save_checkpoint(path)
    rows = quiet_trainer(DeepEnsembleCallback(paths)).test(classifier(), [loader(), outside()], verbose=False)
    found = {key: value for row in rows for key, value in row.items()}
    assert "ood/set1/mutual_information/AUROC" in found
    assert not any(key.startswith(("test_mean", "ood_mean")) for key in found)
