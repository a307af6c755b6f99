"""N from the trainer's loader, for every way to train on a part of the data set."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from tiny_training import CLASSES, EXAMPLES, FEATURES, Classifier, blobs, fit, loader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_bayes import VOGNCallback
from lightning_bayes.errors import ExampleDimensionError, UnknownNumDataError


class Stream(IterableDataset):
    """A stream with a length in an unknown unit."""

    def __iter__(self):
        return iter(blobs())

    def __len__(self):
        return EXAMPLES


class Nested(Classifier):
    """Takes its batch from a dictionary or a tuple of loaders."""

    def training_step(self, batch, batch_idx):
        inner = batch["only"] if isinstance(batch, dict) else batch[0]
        return super().training_step(inner, batch_idx)


class Unsized:
    """A loader without a data set."""

    def __iter__(self):
        return iter(loader())


def found(data, module=None, **kwargs) -> int:
    callback = VOGNCallback()
    fit(module or Classifier(), callback, data=data, **kwargs)
    (group,) = callback.optimizer.param_groups
    return group["posterior"]["num_data"]


def sampled(sampler) -> DataLoader:
    return loader(sampler=sampler)


@pytest.mark.parametrize(
    ("data", "trainer", "expected"),
    [
        (lambda: loader(), {}, 48),
        (lambda: loader(shuffle=True), {}, 48),
        (lambda: loader(7), {}, 48),
        (lambda: loader(7, drop_last=True), {}, 42),
        (lambda: loader(), {"limit_train_batches": 2}, 16),
        (lambda: loader(), {"limit_train_batches": 0.5}, 24),
        (lambda: loader(), {"overfit_batches": 1}, 8),
        (lambda: loader(), {"fast_dev_run": True}, 8),
        (lambda: loader(), {"max_epochs": None, "max_steps": 2}, 48),
        (lambda: loader(), {"accumulate_grad_batches": 3}, 48),
        (lambda: sampled(SubsetRandomSampler(range(24))), {}, 24),
        (lambda: sampled(WeightedRandomSampler(torch.ones(48), 48)), {}, 48),
        (lambda: DataLoader(Subset(blobs(), range(30)), batch_size=8), {}, 30),
        (lambda: DataLoader(blobs(), batch_sampler=BatchSampler(range(48), 8, drop_last=False)), {}, 48),
    ],
    ids=[
        "whole", "shuffled", "uneven", "drop_last", "two_batches", "half", "overfit", "fast_dev_run", "max_steps",
        "accumulation", "subset_sampler", "weighted_sampler", "subset", "batch_sampler",
    ],
)  # fmt: skip
def test_num_data_counts_the_examples_of_one_epoch(data, trainer, expected):
    assert found(data(), **trainer) == expected


def test_a_dictionary_of_one_loader_has_that_loaders_examples():
    assert found({"only": loader()}, Nested()) == EXAMPLES


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: DataLoader(Stream(), batch_size=8), "length of a Stream is not the number of examples"),
        (lambda: [loader(), loader()], "2 training data loaders, so N is ambiguous"),
        (lambda: DataLoader([tuple(b) for b in loader()], batch_size=None), "batch_size=None, so its data set counts"),
        (lambda: Unsized(), "Unsized has no data set"),
    ],
    ids=["iterable", "several", "no_batch_size", "no_data_set"],
)
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")  # Lightning warns about such streams
def test_unknown_num_data_is_an_error_that_names_the_argument(data, message):
    module = Nested()
    with pytest.raises(UnknownNumDataError, match=f"{message}.*Pass num_data="):
        fit(module, VOGNCallback(), data=data())
    assert module.training_steps == 0


class OwnBatchSampler:
    """Batches of growing size, so that the number of examples cannot be inferred."""

    def __iter__(self):
        return iter([list(range(0, 10)), list(range(10, 48))])

    def __len__(self):
        return 2


def test_a_batch_sampler_without_a_batch_size_is_blamed_by_name():
    with pytest.raises(UnknownNumDataError, match=r"OwnBatchSampler.*Pass num_data="):
        fit(Classifier(), VOGNCallback(), data=DataLoader(blobs(), batch_sampler=OwnBatchSampler()))


@pytest.mark.parametrize("data", [lambda: loader(), lambda: [loader(), loader()]], ids=["known", "unknown"])
def test_an_explicit_num_data_wins(data):
    callback = VOGNCallback(num_data=1000)
    batches = data()
    fit(Classifier() if isinstance(batches, DataLoader) else Nested(), callback, data=batches)
    assert callback.optimizer.param_groups[0]["posterior"]["num_data"] == 1000


class Tokens(Classifier):
    """The network processes every feature of an example separately."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x.flatten()[:, None]), y.repeat_interleave(FEATURES))


class OneByOne(Classifier):
    def training_step(self, batch, batch_idx):
        losses = [F.cross_entropy(self(x[None]), y[None]) for x, y in zip(*batch, strict=True)]
        return torch.stack(losses).mean()


def test_layers_that_see_other_examples_than_the_data_set_counts_are_warned_about():
    seen = 8 * FEATURES
    with pytest.warns(UserWarning, match=f"layers see {seen} examples per batch.* batch_size=8.*num_data=") as caught:
        fit(Tokens(net=torch.nn.Linear(1, CLASSES)), VOGNCallback())
    assert sum("layers see" in str(warning.message) for warning in caught) == 1


def test_examples_that_run_one_at_a_time_are_refused():
    with pytest.raises(ExampleDimensionError, match="called 8 times with one row"):
        fit(OneByOne(net=torch.nn.Linear(FEATURES, CLASSES)), VOGNCallback())


def test_who_states_num_data_is_not_warned():
    fit(Tokens(net=torch.nn.Linear(1, CLASSES)), VOGNCallback(num_data=EXAMPLES * FEATURES))


def test_a_data_set_smaller_than_a_batch_is_not_warned_about():
    fit(Classifier(), VOGNCallback(), data=loader(batch_size=64))


class Augmented(LightningDataModule):
    data_augmentation_factor = 5.0

    def train_dataloader(self):
        return loader()


@pytest.mark.parametrize(("arguments", "expected"), [({}, 5.0), ({"data_augmentation_factor": 2.0}, 2.0)])
def test_augmentation_counts_as_the_data_module_says_unless_the_callback_is_told(arguments, expected, caplog):
    callback = VOGNCallback(**arguments)
    with caplog.at_level(logging.INFO):
        fit(Classifier(), callback, data=Augmented())
    assert callback.optimizer.param_groups[0]["posterior"]["data_augmentation_factor"] == expected
    assert ("data_augmentation_factor=5, from Augmented" in caplog.text) == (not arguments)
