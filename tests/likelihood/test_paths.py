"""Paths of leaves in nested outputs."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

from lightning_bayes.likelihood.paths import leaf_at, leaves, with_leaf

Pair = namedtuple("Pair", "mean spread")


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


CASES = {
    "tensor": (torch.zeros(1), [()]),
    "tuple": ((torch.zeros(1), torch.ones(1)), [(0,), (1,)]),
    "dictionary": ({"a": torch.zeros(1), "b": [torch.ones(1)]}, [("a",), ("b", 0)]),
    "named tuple": (Pair(torch.zeros(1), torch.ones(1)), [(0,), (1,)]),
    "dataclass": (Output(torch.zeros(1)), [("logits",)]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_leaf_is_found_at_its_path(case):
    value, paths = CASES[case]
    assert [path for path, _ in leaves(value)] == paths
    assert all(leaf_at(value, path) is leaf for path, leaf in leaves(value))


@pytest.mark.parametrize("case", CASES)
def test_a_leaf_is_replaced_in_a_structure_of_the_same_type(case):
    value, paths = CASES[case]
    changed = with_leaf(value, paths[-1], leaf := torch.full((1,), 7.0))
    assert type(changed) is type(value)
    assert leaf_at(changed, paths[-1]) is leaf
    assert leaf_at(value, paths[-1]) is not leaf
