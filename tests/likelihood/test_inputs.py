"""Which arguments a network gets for inputs as users hold them: one tensor, a tuple, a list, a dictionary."""

from __future__ import annotations

import pytest
import torch

from lightning_bayes.likelihood.inputs import Inputs, arguments_of

X, Z, Y = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)


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


SWAPPED = Inputs((("path", (1,)), ("value", 3), ("path", (0,))))  # forward(z, 3, x) of batches (x, z, y)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ((X, Z, Y), ((Z, 3, X), {})),  # a whole batch, whose entries stand where the record says
        ((Z, X), ((Z, 3, X), {})),  # the inputs alone, in the order of the arguments
        ([Z, X], ((Z, 3, X), {})),
        (X, ((X,), {})),  # one tensor
    ],
)
def test_recorded_inputs_are_taken_from_a_batch_or_given_in_order(inputs, expected):
    assert arguments_of(two, inputs, SWAPPED) == expected


def test_a_record_of_one_input_leaves_a_pair_whole():
    assert arguments_of(one, (X, Z), Inputs((("path", (0,)), ("value", 3)))) == (((X, Z),), {})
