from __future__ import annotations

import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss
from torchmetrics.functional.classification import multiclass_calibration_error

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.metrics import ShiftMetrics, by_severity

SHIFTS = [("fog", 1), ("fog", 3), ("snow", 3)]
KEYS = ["cls/Acc", "cls/NLL", "cls/Brier", "cal/ECE"]


def predictions():
    """Probabilities and targets per shift, of different sizes."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(size, 4, generator=generator, dtype=torch.float64).softmax(-1),
            torch.randint(4, (size,), generator=generator),
        )
        for size in (100, 70, 45)
    ]


def values_of(probs, targets):
    one_hot = torch.nn.functional.one_hot(targets, 4).double()
    return [
        accuracy_score(targets, probs.argmax(-1)),
        log_loss(targets, probs, labels=range(4)),
        (probs - one_hot).square().sum(-1).mean().item(),
        multiclass_calibration_error(probs, targets, 4, n_bins=15).item(),
    ]


def truth():
    by_shift = torch.tensor([values_of(*each) for each in predictions()], dtype=torch.float64)
    rows = {f"shift/{kind}/{severity}/": by_shift[i] for i, (kind, severity) in enumerate(SHIFTS)}
    rows |= {"shift/all/1/": by_shift[0], "shift/all/3/": by_shift[1:].mean(0), "shift/": by_shift.mean(0)}
    return {prefix + key: value.item() for prefix, row in rows.items() for key, value in zip(KEYS, row, strict=True)}


def feed(metric, start, end):
    for shift, (probs, targets) in enumerate(predictions()):
        metric.update(probs[start:end], targets[start:end], shift)


def assert_truth(found):
    expected = truth()
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=1e-6), key


def test_every_shift_and_their_means_equal_scikit_learn_and_torchmetrics():
    metric = ShiftMetrics(SHIFTS)
    for _ in range(2):  # the second time after a reset
        feed(metric, 0, 11)
        feed(metric, 11, None)
        assert_truth({key: value.item() for key, value in metric.compute().items()})
        metric.reset()


def test_states_do_not_grow_with_the_examples():
    metric = ShiftMetrics(SHIFTS)
    before = {name: value.shape for name, value in metric.metric_state.items()}
    feed(metric, 0, None)
    assert {name: value.shape for name, value in metric.metric_state.items()} == before


def test_a_shift_without_examples_is_undefined():
    metric = ShiftMetrics(SHIFTS)
    metric.update(*predictions()[0], 0)
    found = metric.compute()
    assert found["shift/fog/1/cls/Acc"].isfinite()
    assert found["shift/snow/3/cls/Acc"].isnan()
    assert found["shift/snow/3/cal/ECE"].isnan()


def test_by_severity_reads_back_what_was_logged():
    metric = ShiftMetrics(SHIFTS, prefix="shift_mean/")
    feed(metric, 0, None)
    logged = {**metric.compute(), "test_mean/cls/Acc": 0.9, "test/cls/Acc": 0.5, "ood/fog/3/AUROC": 1.0}
    found = by_severity(logged, "_mean")
    assert set(found) == set(KEYS)
    assert found["cls/Acc"][0] == [0.9]
    assert 0 not in found["cls/NLL"]
    expected = truth()
    assert found["cls/Acc"][1] == pytest.approx([expected["shift/fog/1/cls/Acc"]])
    assert found["cls/Acc"][3] == pytest.approx([expected[f"shift/{kind}/3/cls/Acc"] for kind in ("fog", "snow")])
    assert by_severity(logged) == {}


def test_by_severity_ignores_other_keys():
    others = {"shift": 1.0, "shift/all/x": 1.0, "shift/fog/3": 1.0, "shift/fog/weak/cls/Acc": 1.0}
    assert by_severity({**others, "shift/fog/1/cls/Acc": 0.5}) == {"cls/Acc": {1: [0.5]}}


@pytest.mark.parametrize("shifts", [[], [("fog", 1), ("fog", 1)]])
def test_missing_and_repeated_shifts_are_refused(shifts):
    with pytest.raises(HyperparameterError, match=r"must contain at least one \(kind, severity\), and each once"):
        ShiftMetrics(shifts)
