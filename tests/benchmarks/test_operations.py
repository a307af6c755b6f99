"""The count of a step's operations does not change what the step does."""

from __future__ import annotations

import torch

from benchmarks.speed.operations import count
from lightning_bayes.private_torch import version_of


def test_counted_changes_are_seen():
    tensor, source = torch.zeros(2), torch.ones(2)
    before = version_of(tensor)
    found = count(lambda: torch._foreach_copy_([tensor], [source]))
    assert found == {"aten::_foreach_copy_": 1}
    assert tensor.tolist() == [1, 1]
    assert version_of(tensor) > before
