from __future__ import annotations

import pytest
import torch

from lightning_bayes.errors import DatasetError
from lightning_bayes.zoo.data import CIFAR10DataModule

MEAN = torch.tensor([0.4914, 0.4822, 0.4465])  # of the training set, as published
STD = torch.tensor([0.2470, 0.2435, 0.2616])


def as_bytes(loader):
    images = torch.cat([images for images, _ in loader])
    return (images * STD[:, None, None] + MEAN[:, None, None]).mul(255).round().int()


def make(root, **kwargs):
    data = CIFAR10DataModule(root=str(root), val_size=8, **kwargs)
    data.setup("fit")
    data.setup("test")
    return data


def test_reads_torchvisions_files_and_validates_on_training_images_only(cifar_root):
    data = make(cifar_root, batch_size=6)
    train, val = as_bytes(data.train_dataloader()), as_bytes(data.val_dataloader())
    assert len(val) == 8
    assert sorted(torch.cat([train, val])[:, 0, 9, 9].tolist()) == list(range(20))
    assert as_bytes(data.test_dataloader())[:, 0, 9, 9].tolist() == list(range(100, 110))


def test_channels_and_pixels_are_in_order(cifar_root):
    image = as_bytes(make(cifar_root).test_dataloader())[3]
    assert image.shape == (3, 32, 32)
    assert image[:, 5, 7].tolist() == [103, 153, 203]
    assert (image == 255).nonzero().tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]


def test_augmentation_changes_only_training_images(cifar_root):
    torch.manual_seed(0)
    data = make(cifar_root, augment=True)
    train = torch.cat([as_bytes(data.train_dataloader()) for _ in range(20)])
    assert train.shape[1:] == (3, 32, 32)
    # The padding is black, and image 0 has a black red channel, so the test uses the blue channel (i + 100).
    padded = (train[:, 2] == 0).flatten(1).any(dim=1)
    assert 0.9 < padded.float().mean() < 1  # 1 - 1/81 of the crops include padding
    # The bright corner is on the left if not mirrored and on the right if mirrored, unless it was cropped.
    left, right = (train[:, 2, :5, :5] == 255).any(-1).any(-1), (train[:, 2, :5, -5:] == 255).any(-1).any(-1)
    assert left.sum() > 20
    assert right.sum() > 20
    plain = make(cifar_root)
    assert torch.equal(as_bytes(data.val_dataloader()), as_bytes(plain.val_dataloader()))
    assert torch.equal(as_bytes(data.test_dataloader()), as_bytes(plain.test_dataloader()))


def test_without_augmentation_every_epoch_has_the_same_images(cifar_root):
    data = make(cifar_root)
    assert (as_bytes(data.train_dataloader())[:, :, 0, 0] == 255).all()


def test_a_missing_root_is_named(tmp_path):
    with pytest.raises(
        DatasetError,
        match=rf"CIFAR10 is missing or incomplete in {tmp_path}/no.*download=True.*cifar-10-batches-py with",
    ):
        CIFAR10DataModule(root=str(tmp_path / "no")).setup("fit")


def test_a_damaged_file_is_rejected(cifar_root):
    with (cifar_root / "cifar-10-batches-py" / "data_batch_3").open("ab") as file:
        file.write(b"more")
    with pytest.raises(DatasetError, match="missing or incomplete"):
        CIFAR10DataModule(root=str(cifar_root)).setup("fit")


def test_normalises_the_real_training_set(real_root):
    data = CIFAR10DataModule(root=real_root, val_size=0, batch_size=50_000)
    data.setup("fit")
    images, targets = next(iter(data.train_dataloader()))
    assert images.mean(dim=(0, 2, 3), dtype=torch.float64).abs().max() < 5e-4
    assert (images.double().std(dim=(0, 2, 3)) - 1).abs().max() < 5e-4
    assert torch.bincount(targets).tolist() == [5000] * 10
