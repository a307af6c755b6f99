"""Standard errors over seeds, compared with SciPy's, and their formats."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from benchmarks.demo_seeds import criteria
from benchmarks.over_seeds import standard_error


def test_the_standard_error_of_one_run_is_unknown():
    values = [0.3, 0.7, 0.4]
    assert standard_error(values) == pytest.approx(stats.sem(values))
    assert math.isnan(standard_error([0.3]))


def test_one_seed_of_the_demo_decides_no_criterion_that_counts_standard_errors():
    scores = {"cls/Acc": [0.98, 0.98], "cls/NLL": [0.1, 0.1]}
    runs = {"Adam": {**scores, "cal/ECE": [0.01, 0.02]}, "VOGN": {**scores, "cal/ECE": [0.02, 0.03]}}
    name = "ECE no worse within two standard errors"
    assert criteria(runs)[name] is True
    one_seed = {method: {metric: values[:1] for metric, values in metrics.items()} for method, metrics in runs.items()}
    assert [key for key, kept in criteria(one_seed).items() if kept is None] == [name]
    one_seed["VOGN"]["cal/ECE"] = [0.005]
    assert criteria(one_seed)[name] is True
