from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_bayes.errors import DatasetError, HyperparameterError
from lightning_bayes.zoo.data.vision import NormalizedImages, VisionDataModule, split_indices


class Stub:
    """Stands for a torchvision class: 12 grey images for training and 5 for test, each filled with its number."""

    calls: list

    def __init__(self, root, train, download):
        self.calls.append((root, train, download))
        self.data = torch.arange(12 if train else 5, dtype=torch.uint8)[:, None, None].expand(-1, 4, 4)
        self.targets = torch.arange(12 if train else 5) % 2


class StubDataModule(VisionDataModule):
    dataset_class = Stub
    expected_files = "stub.bin"
    mean = (0.0,)
    std = (1 / 255,)  # so that a normalised pixel is the byte itself


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    monkeypatch.setattr(Stub, "calls", [], raising=False)
    return Stub.calls


def numbers(loader):
    return torch.cat([images[:, 0, 0, 0] for images, _ in loader]).round().int().tolist()


def test_validation_and_training_are_disjoint_parts_of_the_training_set():
    train, val = split_indices(100, val_size=30)
    assert len(val) == 30
    assert sorted(train + val) == list(range(100))
    assert (train, val) == split_indices(100, val_size=30)


def test_train_size_takes_the_first_and_leaves_validation_alone():
    train, val = split_indices(100, val_size=30)
    assert split_indices(100, val_size=30, train_size=10) == (train[:10], val)


def test_the_split_is_random_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    train, _ = split_indices(100, val_size=30)
    assert train != sorted(train)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("val_size", "train_size"),
    [(-1, None), (100, None), (30, 71), (30, 0)],
    ids=["negative", "all", "too many", "none"],
)
def test_impossible_sizes_are_refused(val_size, train_size):
    with pytest.raises(
        HyperparameterError, match=f"val_size={val_size} and train_size={train_size} do not fit a training set of 100"
    ):
        split_indices(100, val_size, train_size)


def test_loaders_read_the_promised_examples():
    data = StubDataModule(val_size=4, train_size=6, batch_size=5)
    data.setup("fit")
    data.setup("test")
    train, val = split_indices(12, val_size=4, train_size=6)
    assert sorted(numbers(data.train_dataloader())) == sorted(train) == sorted(data.train_set.indices)
    assert numbers(data.val_dataloader()) == val == data.val_set.indices
    assert numbers(data.test_dataloader()) == numbers(data.predict_dataloader()) == [0, 1, 2, 3, 4]


def test_a_stage_reads_what_it_needs_once(calls):
    data = StubDataModule(root="there", val_size=4)
    data.setup("fit")
    data.setup("validate")
    assert calls == [("there", True, False)]
    data.setup("test")
    data.setup("predict")
    assert calls == [("there", True, False), ("there", False, False)]


def test_downloads_only_when_told_to(calls):
    StubDataModule(root="there").prepare_data()
    assert calls == []
    StubDataModule(root="there", download=True).prepare_data()
    assert calls == [("there", True, True), ("there", False, True)]


def test_no_validation_set_gives_no_loader():
    data = StubDataModule(val_size=0)
    data.setup("fit")
    assert data.val_dataloader() == []
    assert len(data.train_set) == 12


def test_missing_files_name_the_path_and_the_way_out(tmp_path):
    def missing(root, train, download):
        raise RuntimeError("Dataset not found.")

    class Missing(VisionDataModule):
        dataset_class = missing
        expected_files = "stub.bin"

        def __init__(self, root):
            super().__init__(root)
            self.dataset_class = missing

    with pytest.raises(DatasetError, match=rf"missing is not below {tmp_path}/nowhere.*download=True.*holds stub\.bin"):
        Missing(str(tmp_path / "nowhere")).setup("fit")


def test_normalisation_is_per_channel():
    images = torch.randint(256, (6, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    dataset = NormalizedImages(images, torch.arange(6), mean, std)
    batch, targets = next(iter(DataLoader(dataset, batch_size=6)))
    for channel in range(3):
        expected = (images[:, channel].double() / 255 - mean[channel]) / std[channel]
        torch.testing.assert_close(batch[:, channel].double(), expected, rtol=1e-5, atol=1e-5)
    assert targets.tolist() == list(range(6))


def test_one_by_one_equals_a_batch():
    images = torch.arange(48, dtype=torch.uint8).reshape(3, 1, 4, 4)
    dataset = NormalizedImages(images, torch.arange(3), (0.5,), (0.25,))
    for index, (image, target) in enumerate(dataset.__getitems__([0, 1, 2])):
        torch.testing.assert_close(dataset[index], (image, target))


def test_augmentation_sees_single_images_of_bytes_before_normalisation():
    seen = []

    def brighten(image):
        seen.append((tuple(image.shape), image.dtype))
        return image + len(seen)

    dataset = NormalizedImages(
        torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.arange(2), (0.0,), (1 / 255,), brighten
    )
    batch, _ = next(iter(DataLoader(dataset, batch_size=2)))
    assert seen == [((1, 4, 4), torch.uint8)] * 2
    torch.testing.assert_close(batch[:, 0, 0, 0], torch.tensor([1.0, 2.0]))
