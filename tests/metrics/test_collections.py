from __future__ import annotations

import pickle

import pytest
import torch
from distributed import run_on_ranks
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.metrics import (
    AURC,
    AdaptiveCalibrationError,
    ClasswiseCalibrationError,
    CoverageAtRisk,
    MaximumCalibrationError,
    MisclassificationAUPR,
    MisclassificationAUROC,
    MisclassificationFPR95,
    RiskAtCoverage,
    classification_metrics,
    expected_calibration_error,
    sampled_regression_metrics,
)
from lightning_bayes.metrics.scoring import brier_per_example, nll_per_example

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
        f"{prefix}cal/MCE": MaximumCalibrationError()(probs, targets),
        f"{prefix}cal/aECE": AdaptiveCalibrationError()(probs, targets),
        f"{prefix}cal/cECE": ClasswiseCalibrationError(CLASSES)(probs, targets),
        f"{prefix}sc/AURC": AURC()(probs, targets),
        f"{prefix}sc/Cov_5Risk": CoverageAtRisk(0.05)(probs, targets),
        f"{prefix}sc/Risk_80Cov": RiskAtCoverage(0.8)(probs, targets),
        f"{prefix}mis/AUROC": MisclassificationAUROC()(probs, targets),
        f"{prefix}mis/AUPR": MisclassificationAUPR()(probs, targets),
        f"{prefix}mis/FPR95": MisclassificationFPR95()(probs, targets),
    }


def case():
    """The collection, data and expected values."""
    probs, targets = classification_data()
    return classification_metrics(CLASSES, "test/"), (probs, targets), classification_truth("test/", probs, targets)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
def test_values_without_examples_are_undefined():
    found = classification_metrics(CLASSES, "").compute()
    assert found.pop("cls/Acc") == 0  # as torchmetrics has it
    assert len(found) == 12
    assert all(value.isnan() for value in found.values())


def update_in_parts(collection, data, *ends):
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        collection.update(*(column[start:end] for column in data))


def assert_equal(got, expected):
    assert set(got) == set(expected)
    for key, value in expected.items():
        assert float(got[key]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), key


def test_a_collection_has_exactly_the_documented_keys_and_values():
    collection, data, expected = case()
    for _ in range(2):  # the second time after a reset
        update_in_parts(collection, data, 7, 50, 101)
        assert_equal(collection.compute(), expected)
        collection.reset()


def test_a_collection_can_be_pickled_and_cloned_between_updates():
    collection, data, expected = case()
    update_in_parts(collection, data, 7, 50)
    rest = tuple(column[50:] for column in data)
    restored, clone = pickle.loads(pickle.dumps(collection)), collection.clone()
    restored.update(*rest)
    clone.update(*rest)
    assert_equal(restored.compute(), expected)
    assert_equal(clone.compute(), expected)


def test_sampled_regression_metrics_select_their_arguments():
    mean, noise, target = torch.randn(3, 101, generator=torch.Generator().manual_seed(0))
    variance = noise.square() + 0.1
    one_sample = Normal(mean, variance.sqrt()).log_prob(target)[None]
    collection = sampled_regression_metrics("test/")
    for part in (slice(0, 7), slice(7, 101)):
        points = {"mean": mean[part], "variance": variance[part], "target": target[part]}
        collection.update(**points, log_densities=one_sample[:, part])
    rmse = (mean - target).square().mean().sqrt()
    assert_equal(collection.compute(), {"test/reg/RMSE": rmse, "test/reg/NLL": -one_sample.mean()})


def test_a_first_batch_of_perfect_predictions_does_not_couple_the_metrics():
    collection = classification_metrics(CLASSES, "")
    perfect, probs, targets = torch.eye(CLASSES), *classification_data()
    collection.update(perfect, torch.arange(CLASSES))  # NLL and Brier score are both zero
    collection.update(probs, targets)
    everything = torch.cat([perfect, probs]), torch.cat([torch.arange(CLASSES), targets])
    assert_equal(collection.compute(), classification_truth("", *everything))


def test_every_metric_refuses_logits():
    for metric in classification_metrics(2, "").values():
        with pytest.raises(ShapeError, match=r"need probabilities, not logits: pass logits.softmax\(-1\)"):
            metric.update(torch.tensor([[3.0, -1.0]]), torch.tensor([0]))


def test_one_class_is_refused():
    with pytest.raises(HyperparameterError, match=r"at least two classes, got num_classes=1\. Give a binary"):
        classification_metrics(1, "test/")


def logging_module():
    """A module that logs the collection, by `update` and by a call."""
    from lightning.pytorch import LightningModule  # here, so that the spawned processes below need not import it

    class Logs(LightningModule):
        def __init__(self):
            super().__init__()
            self.updated = classification_metrics(CLASSES, "test/")
            self.called = classification_metrics(CLASSES, "called/")

        def test_step(self, batch, batch_idx):
            self.updated.update(*batch)
            self.called(*batch)  # also computes the value of the batch
            for collection in (self.updated, self.called):
                self.log_dict(collection)

    return Logs()


def test_lightning_logs_the_values_of_the_whole_epoch(tmp_path):
    from lightning.pytorch import Trainer

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet)
    columns = classification_data()
    expected = {**classification_truth("test/", *columns), **classification_truth("called/", *columns)}
    module = logging_module()
    for _ in range(2):  # Lightning has reset the metrics in between
        (got,) = trainer.test(module, DataLoader(TensorDataset(*columns), batch_size=25), verbose=False)
        assert_equal(got, expected)


def compare_over_two_ranks(rank):
    collection, data, expected = case()
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
