"""Which arguments a network gets for inputs as users hold them: one tensor, a tuple, a list, a dictionary."""

from __future__ import annotations

import pytest
import torch

from lightning_bayes.likelihood.inputs import arguments_of

X, Z = torch.tensor(1.0), torch.tensor(2.0)


def one(x):
    return x


def two(x, z):
    return x, z


def optional(x, z=None):
    return x, z


def named(*, ids, mask=None):
    return ids, mask


@pytest.mark.parametrize(
    ("forward", "inputs", "expected"),
    [
        (one, X, ((X,), {})),
        (one, (X, Z), (((X, Z),), {})),  # the network takes the pair itself
        (two, (X, Z), ((X, Z), {})),
        (two, [X, Z], ((X, Z), {})),
        (optional, (X, Z), (((X, Z),), {})),  # a pair that could be inputs and targets is not taken apart
        (named, {"ids": X, "mask": Z}, ((), {"ids": X, "mask": Z})),
    ],
)
def test_inputs_without_a_record_follow_the_signature(forward, inputs, expected):
    assert arguments_of(forward, inputs, None) == expected
