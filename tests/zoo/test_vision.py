from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import functional

from lightning_bayes.errors import DataError, HyperparameterError
from lightning_bayes.zoo import BayesClassifier
from lightning_bayes.zoo.data import CIFAR10DataModule, MNISTDataModule
from lightning_bayes.zoo.data.images import ImageSet
from lightning_bayes.zoo.data.splits import split_indices
from lightning_bayes.zoo.data.vision import VisionDataModule, crop_and_mirror, normalized


class Stub:
    """A stub torchvision class with 12 training and 5 test images, greyscale, each filled with its index."""

    calls: list

    def __init__(self, root, train, download):
        self.calls.append((root, train, download))
        self.data = torch.arange(12 if train else 5, dtype=torch.uint8)[:, None, None].expand(-1, 4, 4)
        self.targets = torch.arange(12 if train else 5) % 2


class StubDataModule(VisionDataModule):
    dataset_class = Stub
    expected_files = "stub.bin"
    mean = (0.0,)
    std = (1 / 255,)  # so that a normalised pixel equals its uint8 value
    in_channels = 1
    image_size = 4
    class_names = tuple("0123456789")


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    monkeypatch.setattr(Stub, "calls", [], raising=False)
    return Stub.calls


def image_set(images, mean, std, augmentation=torch.clone):
    return ImageSet(images, torch.arange(len(images)), augmentation, partial(normalized, mean=mean, std=std))


def numbers(loader):
    return torch.cat([images[:, 0, 0, 0] for images, _ in loader]).round().int().tolist()


def test_loaders_read_the_stated_examples():
    data = StubDataModule(val_size=4, train_size=6, batch_size=5)
    data.setup("fit")
    data.setup("test")
    train, val = split_indices(12, val_size=4, train_size=6)
    assert sorted(numbers(data.train_dataloader())) == sorted(train) == sorted(data.train_set.indices)
    assert numbers(data.val_dataloader()) == val == data.val_set.indices
    assert numbers(data.test_dataloader()) == numbers(data.predict_dataloader()) == [0, 1, 2, 3, 4]


def test_each_stage_reads_its_data_once(calls):
    data = StubDataModule(root="there", val_size=4)
    data.setup("fit")
    data.setup("validate")
    assert calls == [("there", True, False)]
    data.setup("test")
    data.setup("predict")
    assert calls == [("there", True, False), ("there", False, False)]


def test_downloads_only_if_allowed(calls):
    StubDataModule(root="there").prepare_data()
    assert calls == []
    StubDataModule(root="there", download=True).prepare_data()
    assert calls == [("there", True, True), ("there", False, True)]


def test_an_empty_validation_set_has_no_loader():
    data = StubDataModule(val_size=0)
    data.setup("fit")
    assert data.val_dataloader() == []
    assert len(data.train_set) == 12


@pytest.mark.parametrize("stage", ["fit", "test"])
@pytest.mark.parametrize("num_classes", [7, 12])
def test_a_model_with_a_different_number_of_classes_is_rejected_before_reading(
    quiet_trainer, calls, stage, num_classes
):
    task = BayesClassifier(nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes)), num_classes)
    expected = rf"Stub has 10 classes \(0, 1, .*\), but the model has num_classes={num_classes}\. Pass num_classes=10"
    with pytest.raises(DataError, match=expected):
        getattr(quiet_trainer(max_epochs=1), stage)(task, datamodule=StubDataModule(val_size=4))
    assert calls == []


def test_few_shots_are_balanced_and_do_not_change_validation():
    data = StubDataModule(val_size=4, shots=2)
    data.setup("fit")
    train, val = split_indices(12, val_size=4)
    assert data.val_set.indices == val
    even, odd = ([i for i in train if i % 2 == label] for label in (0, 1))
    assert data.train_set.indices == even[:2] + odd[:2]


def test_shots_and_train_size_exclude_each_other():
    with pytest.raises(HyperparameterError, match="shots=2 and train_size=4 are mutually exclusive"):
        StubDataModule(shots=2, train_size=4)


def test_augmentation_has_the_papers_factor():
    assert StubDataModule().data_augmentation_factor == 1.0
    assert StubDataModule(augment=True).data_augmentation_factor == 10.0


@pytest.mark.parametrize(("module", "mirrors"), [(CIFAR10DataModule, True), (MNISTDataModule, False)])
def test_only_sets_with_mirror_invariant_classes_are_mirrored(module, mirrors):
    ramp = torch.arange(1, 13, dtype=torch.uint8).expand(50, 1, 12, 12)
    torch.manual_seed(0)
    rows = module(augment=True).augmentation(ramp)[:, 0, 5]
    assert (rows[:, 5] > rows[:, 6]).any() == mirrors
    assert (rows[:, 5] < rows[:, 6]).any()


def test_corrupted_copies_follow_the_test_set_and_have_names():
    data = StubDataModule(val_size=4, corruptions=("brightness", "contrast"), severities=(2, 5))
    data.setup("test")
    test, *shifted = data.test_dataloader()
    assert data.shift_names == (("brightness", 2), ("brightness", 5), ("contrast", 2), ("contrast", 5))
    assert numbers(test) == [0, 1, 2, 3, 4]
    for (kind, severity), loader in zip(data.shift_names, shifted, strict=True):
        assert numbers(loader) == numbers(data.corrupted_dataloader(kind, severity))
    assert numbers(data.predict_dataloader()) == numbers(test)


def test_an_unknown_corruption_is_rejected_at_construction():
    with pytest.raises(HyperparameterError, match=r"no corruption 'rain' of severity 1\. Kinds are gaussian_noise,"):
        StubDataModule(corruptions=("rain",))


def test_a_corrupted_test_set_is_the_corruption_of_each_image():
    data = StubDataModule(val_size=4)
    (images, targets), *_ = data.corrupted_dataloader("brightness", 5)
    assert torch.equal(targets, torch.arange(5) % 2)
    # 0.3 · 255 = 76.5, rounded half to even.
    assert images[:, 0, 0, 0].round().tolist() == [76, 78, 78, 80, 80]


def test_normalisation_is_per_channel():
    images = torch.randint(256, (6, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    dataset = image_set(images, mean, std)
    batch, targets = next(iter(DataLoader(dataset, batch_size=6)))
    for channel in range(3):
        expected = (images[:, channel].double() / 255 - mean[channel]) / std[channel]
        torch.testing.assert_close(batch[:, channel].double(), expected, rtol=1e-5, atol=1e-5)
    assert targets.tolist() == list(range(6))


def test_one_by_one_equals_a_batch():
    images = torch.arange(48, dtype=torch.uint8).reshape(3, 1, 4, 4)
    dataset = image_set(images, (0.5,), (0.25,))
    for index, (image, target) in enumerate(dataset.__getitems__([0, 1, 2])):
        torch.testing.assert_close(dataset[index], (image, target))


def test_augmentation_gets_a_uint8_batch_before_normalisation():
    seen = []

    def brighten(images):
        seen.append((tuple(images.shape), images.dtype))
        return images + torch.tensor([1, 2], dtype=torch.uint8)[:, None, None, None]

    dataset = image_set(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), (0.0,), (1 / 255,), brighten)
    batch, _ = next(iter(DataLoader(dataset, batch_size=2)))
    assert seen == [((2, 1, 4, 4), torch.uint8)]
    torch.testing.assert_close(batch[:, 0, 0, 0], torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("mirrors", [False, True])
def test_crops_equal_torchvisions_with_uniform_frequency(mirrors):
    """An image padded by one pixel has nine crops and nine mirrored crops."""
    image = torch.arange(1, 13, dtype=torch.uint8).reshape(1, 3, 4)
    framed = functional.pad(image, [1])
    crops = [functional.crop(framed, top, left, 3, 4) for top in range(3) for left in range(3)]
    crops += [functional.hflip(crop) for crop in crops] * mirrors
    torch.manual_seed(0)
    count = 9000
    found = crop_and_mirror(image.expand(count, -1, -1, -1), padding=1, mirrors=mirrors)
    shares = torch.tensor([(found == crop).flatten(1).all(1).float().mean() for crop in crops])
    assert shares.sum() == pytest.approx(1)
    expected = 1 / len(crops)
    assert (shares - expected).abs().max() < 4 * (expected * (1 - expected) / count) ** 0.5
