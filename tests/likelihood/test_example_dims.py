"""Which examples an operation keeps: by the numbers of its rows, as a list of them shows."""

from __future__ import annotations

import pytest
import torch

from lightning_bayes.likelihood.example_dims import Selection, example_dim

SIX = torch.empty(6, 4)
MASK, REPEATED = torch.arange(6) > 1, torch.tensor([0, 1, 2, 3, 4, 4])

# what is selected of [6, 4], by a tensor or not, and what it keeps of six examples and of three with two rows each
OPERATIONS = {
    "a column": (lambda v: v[:, 1], False, "all", "all"),
    "columns": (lambda v: v[:, torch.tensor([3, 0])], True, "all", "all"),
    "a column of each row": (lambda v: v[torch.arange(6), torch.arange(6) % 4], True, "all", "all"),
    "a row": (lambda v: v[2], False, "some", "some"),
    "half": (lambda v: v[:3], False, "some", "piece"),
    "every second": (lambda v: v[::2], False, "some", "piece"),
    "half by number": (lambda v: v[torch.arange(3)], True, "some", "some"),
    "a mask": (lambda v: v[MASK], True, "some", "some"),
    "a mask of values": (lambda v: v.masked_select(MASK[:, None]), True, "some", "some"),
    "one row twice": (lambda v: v[REPEATED], True, "some", "some"),
    "all in order": (lambda v: v.index_select(0, torch.arange(6)), True, "all", "all"),
    "another order": (lambda v: v[torch.tensor([5, 0, 1, 2, 3, 4])], True, "permuted", "permuted"),
    "flipped": (lambda v: v.flip(0), False, "permuted", "permuted"),
    "flipped columns": (lambda v: v.flip(1), False, "all", "all"),
    "rolled": (lambda v: v.roll(2, 0), False, "permuted", "permuted"),
    "pieces": (lambda v: v.split(3), False, "some", "piece"),
    "columns apart": (lambda v: v.unbind(1), False, "all", "all"),
    "iterated": (iter, False, "some", "some"),
    "the largest row": (lambda v: v.amax(0), False, "some", "some"),
    "the largest column": (lambda v: v.amax(1), False, "all", "all"),
    "none": (lambda v: v[:0], False, "some", "some"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_an_operation_keeps(name):
    select, by_tensor, of_six, of_three = OPERATIONS[name]
    selection = Selection.of(SIX, select, by_tensor)
    assert selection.kept(6) == of_six
    assert selection.kept(3) == of_three
    assert selection.chooses_rows == (by_tensor and of_six != "all")


def test_a_slice_of_large_values_costs_no_memory():
    large = Selection((4, 10**6, 10**6), lambda v: v[:, 1:, ::2], torch.device("cpu"))
    assert large.kept(4) == "all"


@pytest.mark.parametrize(
    ("shape", "batch_size", "found", "arguments"),
    [
        ((6, 4), 6, 0, {}),
        ((4, 6), 6, 1, {}),  # time first
        ((6, 6), 6, 0, {}),
        ((6, 6), 6, 1, {"order": "second"}),
        ((6, 6), 6, 1, {"preferred": 1}),
        ((5, 6), 6, None, {"classes": 1}),
        ((12, 4), 6, 0, {}),  # two rows of each example
        ((12, 6), 6, 0, {"order": "strided"}),
        ((3, 4), 6, None, {}),  # fewer rows than examples
        ((), 6, None, {}),
        ((5,), None, 0, {}),
        ((), None, None, {}),
    ],
)
def test_the_dimension_of_the_examples(shape, batch_size, found, arguments):
    assert example_dim(shape, batch_size, **arguments) == found
