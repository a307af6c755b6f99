from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from lightning_bayes.errors import HyperparameterError, NonFiniteError, ShapeError
from lightning_bayes.metrics import OODDetection
from lightning_bayes.metrics.detection import (
    MisclassificationAUPR,
    MisclassificationAUROC,
    MisclassificationFPR95,
    ood_aupr,
    ood_auroc,
    ood_fpr95,
)


def scikit_learn_fpr95(is_ood, scores):
    false_positive_rate, true_positive_rate, _ = roc_curve(is_ood, scores, drop_intermediate=False)
    return false_positive_rate[true_positive_rate >= 0.95].min()


def scored(kind, size=240):
    generator = torch.Generator().manual_seed(0)
    is_ood = torch.arange(size) % 3 == 0
    scores = torch.randn(size, generator=generator) + 1.5 * is_ood
    return {
        "within [0, 1]": scores.sigmoid(),
        "outside": scores,
        "far outside": 1000 + 100 * scores,  # the sigmoid of each is 1
        "large and negative": -1e30 * torch.exp(-scores),
        "ties": scores.round(),
        "all equal": torch.zeros(size),
        "infinite": torch.where(scores > 2, torch.inf, scores),
        "float64": scores.double(),
    }[kind], is_ood


KINDS = ["within [0, 1]", "outside", "far outside", "large and negative", "ties", "all equal", "float64"]
FUNCTIONS = {ood_auroc: roc_auc_score, ood_aupr: average_precision_score, ood_fpr95: scikit_learn_fpr95}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_equal_scikit_learn(function, kind):
    scores, is_ood = scored(kind)
    assert function(scores, is_ood).item() == pytest.approx(FUNCTIONS[function](is_ood, scores), rel=1e-5)


def test_infinite_scores_are_the_largest():
    scores, is_ood = scored("infinite")
    finite = scores.clamp(max=1e6)
    assert ood_auroc(scores, is_ood).item() == pytest.approx(roc_auc_score(is_ood, finite))


@pytest.mark.parametrize("ood", [3, 12])
def test_perfect_detection_does_not_exceed_one(ood):
    """Ten equal steps of a false-positive rate sum to more than 1 in float32."""
    scores = torch.arange(10 + ood).float()
    assert ood_auroc(scores, scores >= 10) == 1


def test_a_higher_score_means_more_ood():
    is_ood = torch.tensor([False, False, True, True])
    scores = torch.tensor([-4.0, -3.0, 20.0, 30.0])
    assert [f(scores, is_ood).item() for f in FUNCTIONS] == [1, 1, 0]
    assert [f(-scores, is_ood).item() for f in FUNCTIONS] == pytest.approx([0, (1 / 3 + 2 / 4) / 2, 1])


@pytest.mark.parametrize("positives", [19, 20, 21])
def test_fpr95_detects_at_least_95_percent(positives):
    # One in-distribution score lies below the k-th highest of the OOD scores, for every k.
    ood = torch.arange(positives, 0, -1).float()
    scores, is_ood = torch.cat([ood, ood + 0.5]), torch.cat([torch.ones(positives), torch.zeros(positives)])
    needed = next(k for k in range(positives + 1) if 100 * k >= 95 * positives)
    assert ood_fpr95(scores, is_ood).item() == pytest.approx(needed / positives)


@pytest.mark.parametrize("present", [True, False])
def test_values_are_undefined_if_one_kind_of_input_is_missing(present):
    scores, is_ood = torch.tensor([0.1, 0.2]), torch.tensor([present, present])
    for function in FUNCTIONS:
        assert function(scores, is_ood).isnan()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_invalid_input_is_refused(function):
    with pytest.raises(ShapeError, match=r"scores \[batch\] and is_ood \[batch\], got \[3, 1\] and \[3\].*one score"):
        function(torch.rand(3, 1), torch.zeros(3))
    with pytest.raises(NonFiniteError, match=r"1 of 2 OOD scores are nan"):
        function(torch.tensor([0.0, torch.nan]), torch.zeros(2))
    with pytest.raises(ShapeError, match=r"has values from 0 to 7\. Do not pass class labels"):
        function(torch.rand(2), torch.tensor([0, 7]))


OF_ERRORS = {
    MisclassificationAUROC: roc_auc_score,
    MisclassificationAUPR: average_precision_score,
    MisclassificationFPR95: scikit_learn_fpr95,
}


def predictions(kind):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(500, 5, generator=generator)
    targets = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    sharper = {"smooth": 1.0, "saturated": 12.0}[kind]  # the latter has many confidences of exactly one
    return (sharper * logits).softmax(-1), targets


@pytest.mark.parametrize("kind", ["smooth", "saturated"])
@pytest.mark.parametrize("metric_class", OF_ERRORS)
def test_detection_of_errors_equals_scikit_learn_on_uneven_batches(metric_class, kind):
    probs, targets = predictions(kind)
    is_error = probs.argmax(-1) != targets
    metric = metric_class()
    metric.update(probs[:7], targets[:7])
    metric.update(probs[7:], targets[7:])
    expected = OF_ERRORS[metric_class](is_error, -probs.amax(-1))
    assert metric.compute().item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("label", [0, 1])
def test_values_are_undefined_without_errors_or_without_correct_predictions(label):
    probs, targets = torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([label, label])
    for metric_class in OF_ERRORS:
        assert metric_class()(probs, targets).isnan()


# -- several sets, several scores ---------------------------------------------------------------------------------------

SCORES = ["entropy", "energy"]


def scored_sets(sets):
    """Scores of the test set and of `sets` OOD sets, with different sizes and shifts."""
    generator = torch.Generator().manual_seed(0)
    return [
        {name: torch.randn(60 + 10 * i, generator=generator) + i * (0.5 + j) for j, name in enumerate(SCORES)}
        for i in range(sets + 1)
    ]


def truth(prefix, inside, outside):
    labels = np.repeat([0, 1], [len(inside), len(outside)])
    scores = np.concatenate([inside, outside])
    return {
        f"{prefix}AUROC": roc_auc_score(labels, scores),
        f"{prefix}AUPR": average_precision_score(labels, scores),
        f"{prefix}FPR95": scikit_learn_fpr95(labels, scores),
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
    data, metric = scored_sets(len(names)), OODDetection(names, SCORES)
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


def test_sets_and_scores_that_do_not_fit_are_refused():
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
