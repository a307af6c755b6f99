from __future__ import annotations

import pytest
import torch

from lightning_bayes.errors import DatasetError
from lightning_bayes.zoo.data import FashionMNISTDataModule

MEAN, STD = 0.2860, 0.3530  # of the training set, as published


def pixels(loader):
    images = torch.cat([images for images, _ in loader])
    assert images.shape[1:] == (1, 28, 28)
    return (images[:, 0, 0, 0] * STD + MEAN).mul(255).round().int().tolist()


def test_reads_torchvisions_files_and_validates_on_training_images_only(idx_root):
    data = FashionMNISTDataModule(root=str(idx_root), val_size=8, batch_size=6)
    data.setup("fit")
    data.setup("test")
    train, val = pixels(data.train_dataloader()), pixels(data.val_dataloader())
    assert len(val) == 8
    assert sorted(train + val) == list(range(20))
    assert pixels(data.test_dataloader()) == list(range(100, 110))


def test_images_keep_their_targets(idx_root):
    data = FashionMNISTDataModule(root=str(idx_root), val_size=8)
    data.setup("fit")
    images, targets = next(iter(data.val_dataloader()))
    assert targets.tolist() == [pixel % 10 for pixel in pixels([(images, targets)])]
    assert data.num_classes == len(data.class_names) == 10


def test_a_missing_root_is_named(tmp_path):
    with pytest.raises(
        DatasetError,
        match=rf"FashionMNIST is missing or incomplete in {tmp_path}/nowhere.*download=True.*FashionMNIST/raw/.*idx3",
    ):
        FashionMNISTDataModule(root=str(tmp_path / "nowhere")).setup("fit")


def test_normalises_the_real_training_set(real_root):
    data = FashionMNISTDataModule(root=real_root, val_size=0, batch_size=60_000)
    data.setup("fit")
    images, targets = next(iter(data.train_dataloader()))
    assert len(images) == 60_000
    assert images.double().mean().abs() < 5e-4
    assert abs(images.double().std() - 1) < 5e-4
    assert torch.bincount(targets).min() > 5000
