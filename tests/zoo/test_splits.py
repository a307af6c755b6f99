from __future__ import annotations

from collections import Counter

import pytest
import torch

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.zoo.data.splits import few_shots, split_indices, stratified_split


def test_validation_and_training_are_disjoint_parts_of_the_training_set():
    train, val = split_indices(100, val_size=30)
    assert len(val) == 30
    assert sorted(train + val) == list(range(100))
    assert (train, val) == split_indices(100, val_size=30)


def test_train_size_does_not_change_the_validation_set():
    train, val = split_indices(100, val_size=30)
    assert split_indices(100, val_size=30, train_size=10) == (train[:10], val)


def test_the_split_is_random_and_does_not_use_the_global_generator():
    before = torch.get_rng_state()
    train, _ = split_indices(100, val_size=30)
    assert train != sorted(train)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("val_size", "train_size"),
    [(-1, None), (100, None), (30, 71), (30, 0)],
    ids=["negative", "all", "too many", "none"],
)
def test_impossible_sizes_are_rejected(val_size, train_size):
    with pytest.raises(
        HyperparameterError, match=f"val_size={val_size} and train_size={train_size} do not fit a training set of 100"
    ):
        split_indices(100, val_size, train_size)


def test_the_same_fraction_of_each_class_is_held_out():
    targets = [0] * 40 + [1] * 20 + [2] * 10
    stay, aside = stratified_split(targets, fraction=0.1)
    assert sorted(stay + aside) == list(range(70))
    assert Counter(targets[i] for i in aside) == {0: 4, 1: 2, 2: 1}
    assert (stay, aside) == stratified_split(torch.tensor(targets), fraction=0.1)
    assert aside != sorted(aside)


def test_at_least_one_example_per_class_is_held_out_unless_the_fraction_is_zero():
    targets = [0] * 40 + [1] * 2
    assert Counter(targets[i] for i in stratified_split(targets, 0.05)[1]) == {0: 2, 1: 1}
    assert stratified_split(targets, 0)[1] == []


@pytest.mark.parametrize(
    ("targets", "share", "message"),
    [
        ([0, 0], 1.0, r"held-out fraction 1 of each class must be in \[0, 1\)"),
        ([0, 0], -0.1, r"held-out fraction -0\.1 of each class"),
        ([0, 0, 7], 0.1, r"Holding out 1 of 1 examples of class 7 leaves none for training"),
        ([0, 0], 0.9, r"Holding out 2 of 2 examples of class 0"),
    ],
)
def test_impossible_fractions_are_rejected(targets, share, message):
    with pytest.raises(HyperparameterError, match=message):
        stratified_split(targets, share)


def test_few_shots_are_the_first_indices_of_each_class():
    targets = torch.arange(30) % 3
    order = list(range(29, 5, -1))
    assert few_shots(order, targets, shots=2) == [27, 24, 28, 25, 29, 26]


@pytest.mark.parametrize(
    ("shots", "message"),
    [
        (0, r"shots=0 must be between 1 and the size"),
        (3, r"too few examples: 1 \(2\), 4 \(0\)\."),
    ],
)
def test_too_many_shots_list_all_small_classes(shots, message):
    with pytest.raises(HyperparameterError, match=message):
        few_shots([0, 1, 2, 3, 4], targets=[0, 0, 0, 1, 1, 4], shots=shots)
