from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from lightning_bayes.errors import HyperparameterError, NonFiniteError, ShapeError
from lightning_bayes.metrics import OODDetection

SCORES = ["entropy", "energy"]


def scored(sets):
    """Scores of the test set and of `sets` OOD sets, with different sizes and shifts."""
    generator = torch.Generator().manual_seed(0)
    return [
        {name: torch.randn(60 + 10 * i, generator=generator) + i * (0.5 + j) for j, name in enumerate(SCORES)}
        for i in range(sets + 1)
    ]


def fpr95(is_ood, scores):
    false_positive_rate, true_positive_rate, _ = roc_curve(is_ood, scores, drop_intermediate=False)
    return false_positive_rate[true_positive_rate >= 0.95].min()


def truth(prefix, inside, outside):
    labels = np.repeat([0, 1], [len(inside), len(outside)])
    scores = np.concatenate([inside, outside])
    return {
        f"{prefix}AUROC": roc_auc_score(labels, scores),
        f"{prefix}AUPR": average_precision_score(labels, scores),
        f"{prefix}FPR95": fpr95(labels, scores),
    }


def expected(data, names):
    everything = np.concatenate([each["entropy"] for each in data[1:]])
    values = truth("ood/", data[0]["entropy"], everything)
    for name, each in zip(names, data[1:], strict=True):
        if len(names) > 1:
            values |= truth(f"ood/{name}/", data[0]["entropy"], each["entropy"])
        for score in SCORES:
            values |= truth(f"ood/{name}/{score}/", data[0][score], each[score])
    return values


def feed(metric, data, parts=((0, 25), (25, None))):
    for index, scores in enumerate(data):
        for start, end in parts:
            metric.update({name: values[start:end] for name, values in scores.items()}, index)


@pytest.mark.parametrize("names", [["svhn"], ["svhn", "lsun", "noise"]])
def test_every_set_and_score_equals_scikit_learn(names):
    data, metric = scored(len(names)), OODDetection(names, SCORES)
    for _ in range(2):  # the second time after a reset
        feed(metric, data)
        found, values = metric.compute(), expected(data, names)
        assert set(found) == set(values)
        for key, value in values.items():
            assert found[key].item() == pytest.approx(value, abs=1e-6), key
        metric.reset()


def test_values_are_undefined_if_a_set_is_empty():
    metric = OODDetection(["svhn"], ["entropy"])
    metric.update({"entropy": torch.tensor([0.1, 0.2])}, 0)
    assert all(value.isnan() for value in metric.compute().values())


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
def test_values_are_undefined_without_any_input():
    found = OODDetection(["svhn"], ["entropy"]).compute()
    assert len(found) == 6
    assert all(value.isnan() for value in found.values())


def test_invalid_input_is_refused():
    for sets, scores, message in [
        ([], ["entropy"], r"sets=\[\] must contain at least one name, each once"),
        (["a", "a"], ["entropy"], r"sets=\['a', 'a'\] must contain"),
        (["a"], [], r"scores=\[\] must contain"),
    ]:
        with pytest.raises(HyperparameterError, match=message):
            OODDetection(sets, scores)
    metric = OODDetection(["a"], SCORES)
    with pytest.raises(
        ShapeError, match=r"the scores \['entropy', 'energy'\], \[batch\] each, got \{'entropy': \[2\]\}"
    ):
        metric.update({"entropy": torch.zeros(2)}, 0)
    with pytest.raises(ShapeError, match=r"\{'entropy': \[2\], 'energy': \[3\]\}"):
        metric.update({"entropy": torch.zeros(2), "energy": torch.zeros(3)}, 0)
    with pytest.raises(NonFiniteError, match="1 of 2 inputs have a score of nan"):
        metric.update({"entropy": torch.zeros(2), "energy": torch.tensor([0.0, torch.nan])}, 0)
