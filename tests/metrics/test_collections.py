from __future__ import annotations

import pickle

import pytest
import torch
from distributed import run_on_ranks
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.metrics import (
    adaptive_calibration_error,
    aurc,
    brier_per_example,
    classification_metrics,
    classwise_calibration_error,
    coverage_at_risk,
    expected_calibration_error,
    gaussian_nll,
    maximum_calibration_error,
    misclassification_aupr,
    misclassification_auroc,
    misclassification_fpr95,
    nll_per_example,
    ood_aupr,
    ood_auroc,
    ood_fpr95,
    ood_metrics,
    regression_metrics,
    risk_at_coverage,
    sampled_regression_metrics,
)

CLASSES = 3


def classification_data(batch=101):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, CLASSES, generator=generator).mul(2).round()  # rounded, so that confidences tie
    return logits.softmax(-1), torch.randint(CLASSES, (batch,), generator=generator)


def classification_truth(prefix, probs, targets):
    return {
        f"{prefix}cls/Acc": (probs.argmax(-1) == targets).float().mean(),
        f"{prefix}cls/NLL": nll_per_example(probs, targets).mean(),
        f"{prefix}cls/Brier": brier_per_example(probs, targets).mean(),
        f"{prefix}cal/ECE": expected_calibration_error(probs, targets),
        f"{prefix}cal/MCE": maximum_calibration_error(probs, targets),
        f"{prefix}cal/aECE": adaptive_calibration_error(probs, targets),
        f"{prefix}cal/cECE": classwise_calibration_error(probs, targets),
        f"{prefix}sc/AURC": aurc(probs, targets),
        f"{prefix}sc/Cov_5Risk": coverage_at_risk(probs, targets, 0.05),
        f"{prefix}sc/Risk_80Cov": risk_at_coverage(probs, targets, 0.8),
        f"{prefix}mis/AUROC": misclassification_auroc(probs, targets),
        f"{prefix}mis/AUPR": misclassification_aupr(probs, targets),
        f"{prefix}mis/FPR95": misclassification_fpr95(probs, targets),
    }


def ood_data(batch=101):
    generator = torch.Generator().manual_seed(0)
    is_ood = torch.arange(batch) % 2 == 0
    return torch.randn(batch, generator=generator).mul(3).round() + 2 * is_ood, is_ood


def ood_truth(scores, is_ood):
    return {
        "ood/AUROC": ood_auroc(scores, is_ood),
        "ood/AUPR": ood_aupr(scores, is_ood),
        "ood/FPR95": ood_fpr95(scores, is_ood),
    }


def regression_data(batch=101):
    mean, noise, target = torch.randn(3, batch, generator=torch.Generator().manual_seed(0))
    return mean, noise.square() + 0.1, target


def regression_truth(prefix, mean, variance, target):
    return {
        f"{prefix}reg/RMSE": (mean - target).square().mean().sqrt(),
        f"{prefix}reg/NLL": gaussian_nll(mean, variance, target).mean(),
    }


def cases():
    """The collection, data and expected values of each of the three tasks."""
    probs, targets = classification_data()
    scores, is_ood = ood_data()
    points = regression_data()
    return [
        (classification_metrics(CLASSES, "test/"), (probs, targets), classification_truth("test/", probs, targets)),
        (ood_metrics(), (scores, is_ood), ood_truth(scores, is_ood)),
        (regression_metrics("test/"), points, regression_truth("test/", *points)),
    ]


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
def test_values_without_examples_are_undefined():
    found = {**classification_metrics(CLASSES, "").compute(), **ood_metrics().compute()}
    assert found.pop("cls/Acc") == 0  # as torchmetrics has it
    assert len(found) == 15
    assert all(value.isnan() for value in found.values())


def update_in_parts(collection, data, *ends):
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        collection.update(*(column[start:end] for column in data))


def assert_equal(got, expected):
    assert set(got) == set(expected)
    for key, value in expected.items():
        assert float(got[key]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("case", cases(), ids=["classification", "ood", "regression"])
def test_a_collection_has_exactly_the_documented_keys_and_values(case):
    collection, data, expected = case
    for _ in range(2):  # the second time after a reset
        update_in_parts(collection, data, 7, 50, 101)
        assert_equal(collection.compute(), expected)
        collection.reset()


@pytest.mark.parametrize("case", cases(), ids=["classification", "ood", "regression"])
def test_calling_a_collection_returns_batch_values_and_accumulates(case):
    collection, data, expected = case
    collection(*(column[:50] for column in data))
    last = collection(*(column[50:] for column in data))
    assert_equal(collection.compute(), expected)
    collection.reset()
    collection.update(*(column[50:] for column in data))
    assert_equal(last, collection.compute())


@pytest.mark.parametrize("case", cases(), ids=["classification", "ood", "regression"])
def test_a_collection_can_be_pickled_and_cloned_between_updates(case):
    collection, data, expected = case
    update_in_parts(collection, data, 7, 50)
    rest = tuple(column[50:] for column in data)
    restored, clone = pickle.loads(pickle.dumps(collection)), collection.clone()
    restored.update(*rest)
    clone.update(*rest)
    assert_equal(restored.compute(), expected)
    assert_equal(clone.compute(), expected)


def test_sampled_regression_metrics_select_their_arguments():
    mean, variance, target = regression_data()
    one_sample = -gaussian_nll(mean, variance, target)[None]
    collection = sampled_regression_metrics("test/")
    for part in (slice(0, 7), slice(7, 101)):
        points = {"mean": mean[part], "variance": variance[part], "target": target[part]}
        collection.update(**points, log_densities=one_sample[:, part])
    assert_equal(collection.compute(), regression_truth("test/", mean, variance, target))


def test_a_clone_with_another_prefix_has_the_other_keys():
    collection = classification_metrics(CLASSES, "val/").clone(prefix="test/")
    probs, targets = classification_data()
    collection.update(probs, targets)
    assert_equal(collection.compute(), classification_truth("test/", probs, targets))


def test_a_first_batch_of_perfect_predictions_does_not_couple_the_metrics():
    collection = classification_metrics(CLASSES, "")
    perfect, probs, targets = torch.eye(CLASSES), *classification_data()
    collection.update(perfect, torch.arange(CLASSES))  # NLL and Brier score are both zero
    collection.update(probs, targets)
    everything = torch.cat([perfect, probs]), torch.cat([torch.arange(CLASSES), targets])
    assert_equal(collection.compute(), classification_truth("", *everything))


def test_one_class_is_refused():
    with pytest.raises(HyperparameterError, match=r"at least two classes, got num_classes=1\. Give a binary"):
        classification_metrics(1, "test/")


def logging_module():
    """A module that logs the three collections over batches of different sizes."""
    from lightning.pytorch import LightningModule  # here, so that the spawned processes below need not import it

    class Logs(LightningModule):
        def __init__(self):
            super().__init__()
            self.cls = classification_metrics(CLASSES, "test/")
            self.ood = ood_metrics()
            self.reg = regression_metrics("test/")

        def test_step(self, batch, batch_idx):
            probs, targets, scores, is_ood, mean, variance, target = batch
            self.cls.update(probs, targets)
            self.ood(scores, is_ood)  # the other idiom: forward, which also computes the value of the batch
            self.reg.update(mean, variance, target)
            for collection in (self.cls, self.ood, self.reg):
                self.log_dict(collection)

    return Logs()


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # raised by Lightning with torch 2.15
def test_lightning_logs_the_values_of_the_whole_epoch(tmp_path):
    from lightning.pytorch import Trainer

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet)
    columns = (*classification_data(), *ood_data(), *regression_data())
    expected = {key: value for _, _, truth in cases() for key, value in truth.items()}
    module = logging_module()
    for _ in range(2):  # Lightning has reset the metrics in between
        (got,) = trainer.test(module, DataLoader(TensorDataset(*columns), batch_size=25), verbose=False)
        assert_equal(got, expected)


def compare_over_two_ranks(rank):
    for collection, data, expected in cases():
        shard = slice(0, 30) if rank == 0 else slice(30, 101)
        update_in_parts(collection, tuple(column[shard] for column in data), 5, 101)
        assert_equal(collection.compute(), expected)
        collection.reset()
        if rank == 0:  # the other one sees no data at all
            collection.update(*data)
        assert_equal(collection.compute(), expected)


@pytest.mark.ddp
def test_two_ranks_with_uneven_shards_agree_with_one_process(tmp_path):
    run_on_ranks(compare_over_two_ranks, 2, tmp_path)
