from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_images import write_idx

from lightning_bayes.errors import DataError, DatasetError
from lightning_bayes.zoo.data import FashionMNISTDataModule, MNISTDataModule

STATISTICS = {MNISTDataModule: (0.1307, 0.3081), FashionMNISTDataModule: (0.2860, 0.3530)}  # published mean and std
each_module = pytest.mark.parametrize("module", STATISTICS)


def pixels(module, loader):
    mean, std = STATISTICS[module]
    images = torch.cat([images for images, _ in loader])
    assert images.shape[1:] == (1, 28, 28)
    return (images[:, 0, 0, 0] * std + mean).mul(255).round().int().tolist()


@each_module
def test_reads_torchvisions_files_and_validates_on_training_images_only(module, idx_root):
    data = module(root=str(idx_root), val_size=8, batch_size=6)
    data.setup("fit")
    data.setup("test")
    train, val = pixels(module, data.train_dataloader()), pixels(module, data.val_dataloader())
    assert len(val) == 8
    assert sorted(train + val) == list(range(20))
    assert pixels(module, data.test_dataloader()) == list(range(100, 110))


@each_module
def test_images_keep_their_targets(module, idx_root):
    data = module(root=str(idx_root), val_size=8)
    data.setup("fit")
    images, targets = next(iter(data.val_dataloader()))
    assert targets.tolist() == [pixel % 10 for pixel in pixels(module, [(images, targets)])]
    assert data.num_classes == len(data.class_names) == 10


@each_module
def test_a_missing_root_is_named(module, tmp_path):
    name = module.dataset_class.__name__
    message = rf"^{name} is missing or incomplete in {tmp_path}/nowhere.*download=True.* {name}/raw/.*idx3"
    with pytest.raises(DatasetError, match=message):
        module(root=str(tmp_path / "nowhere")).setup("fit")


@pytest.mark.parametrize("part", ["images-idx3", "labels-idx1"])
@pytest.mark.parametrize("size", [0, 3, 10, 17])
def test_a_truncated_file_is_named(idx_root, part, size):
    file = idx_root / "MNIST" / "raw" / f"t10k-{part}-ubyte"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DatasetError, match=rf"MNIST is missing or incomplete in {idx_root} \(.*download=True"):
        MNISTDataModule(root=str(idx_root)).setup("test")


def test_all_problems_are_listed(idx_root):
    raw = idx_root / "MNIST" / "raw"
    write_idx(raw / "t10k-images-idx3-ubyte", np.zeros((10, 28, 14), dtype=np.uint8))
    write_idx(raw / "t10k-labels-idx1-ubyte", np.array([0, 1, 77], dtype=np.uint8))
    expected = (
        r"has images of shape \[1, 28, 14\] instead of \[1, 28, 28\]; 3 labels for 10 images; "
        r"labels \[77\] outside 0 to 9\. The files are damaged"
    )
    with pytest.raises(DataError, match=expected):
        MNISTDataModule(root=str(idx_root)).setup("test")


@each_module
def test_normalises_the_real_training_set(module, real_root):
    data = module(root=real_root, val_size=0, batch_size=60_000)
    data.setup("fit")
    images, targets = next(iter(data.train_dataloader()))
    assert len(images) == 60_000
    assert images.double().mean().abs() < 5e-4
    assert abs(images.double().std() - 1) < 5e-4
    assert torch.bincount(targets).min() > 5000
