"""How many examples fit into a workspace: by counting bytes."""

from __future__ import annotations

import pytest

from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.errors import HyperparameterError


@pytest.mark.parametrize(
    ("mebibytes", "elements", "expected"),
    [
        (1.0, 1024, 256),  # 4 bytes each
        (1.0, 1000, 262),
        (0.5, 1024, 128),
        (1.0, 10**9, 1),  # one example at a time may exceed the limit
        (1.0, 0, 2**18),
    ],
)
def test_as_many_examples_fit_as_their_floats_do(mebibytes, elements, expected):
    assert Workspace(mebibytes).examples_at_once(elements) == expected


@pytest.mark.parametrize("limit", [0, -1.0])
def test_a_limit_that_is_not_positive_is_refused_with_its_value(limit):
    with pytest.raises(HyperparameterError, match=rf"workspace_mib={limit} must be above 0"):
        Workspace(limit)
