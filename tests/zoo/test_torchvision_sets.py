"""The image sets of torchvision: files, pixels, normalisation, augmentation, and out-of-distribution sets."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from fake_images import write_idx, write_image_folder
from torchvision.transforms.v2 import functional

from lightning_bayes.errors import DataError, DatasetError, HyperparameterError
from lightning_bayes.zoo import BayesClassifier, LeNet5
from lightning_bayes.zoo.data import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    FashionMNISTDataModule,
    KMNISTDataModule,
    MNISTDataModule,
    SVHNDataModule,
)

GREY = (MNISTDataModule, FashionMNISTDataModule, KMNISTDataModule)
COLOUR = (CIFAR10DataModule, CIFAR100DataModule, SVHNDataModule)
PUBLISHED = {  # mean and standard deviation of the training images
    MNISTDataModule: ((0.1307,), (0.3081,)),
    FashionMNISTDataModule: ((0.2860,), (0.3530,)),
    CIFAR10DataModule: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
TOLERANCES = dict.fromkeys(PUBLISHED, 5e-4)  # of the normalised training set; rounded more coarsely elsewhere


def make(module, root, stage="test", **kwargs):
    data = module(root=str(root), val_size=8, batch_size=6, **kwargs)
    data.setup(stage)
    return data


def as_bytes(data, loader):
    images = torch.cat([images for images, _ in loader])
    mean, std = (torch.tensor(values)[:, None, None] for values in (data.mean, data.std))
    return (images * std + mean).mul(255).round().int()


def targets(loader):
    return torch.cat([targets for _, targets in loader]).tolist()


@pytest.fixture
def roots(idx_root, cifar_root, cifar100_root, svhn_root):
    """One folder with all sets."""
    return idx_root


# -- each set ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [*GREY, *COLOUR])
def test_reads_torchvisions_files_and_validates_on_training_images_only(module, roots):
    data = make(module, roots)
    data.setup("fit")
    train, val, test = (
        as_bytes(data, loader()) for loader in (data.train_dataloader, data.val_dataloader, data.test_dataloader)
    )
    assert train.shape[1:] == ((1, 28, 28) if module in GREY else (3, 32, 32))
    assert len(val) == 8
    assert sorted(torch.cat([train, val])[:, 0, 9, 9].tolist()) == list(range(20))
    offsets = (0,) if module in GREY else (0, 50, 100)
    assert test[:, :, 9, 9].tolist() == [[i + offset for offset in offsets] for i in range(100, 110)]


@pytest.mark.parametrize("module", [*GREY, *COLOUR])
def test_images_keep_their_targets(module, roots):
    data = make(module, roots, "fit")
    pixels = as_bytes(data, data.val_dataloader())[:, 0, 9, 9].tolist()
    factor = 7 if module is CIFAR100DataModule else 1
    assert targets(data.val_dataloader()) == [pixel * factor % data.num_classes for pixel in pixels]
    assert data.num_classes == len(set(data.class_names)) == (100 if module is CIFAR100DataModule else 10)


def test_channels_and_pixels_are_in_order(cifar_root):
    data = make(CIFAR10DataModule, cifar_root)
    image = as_bytes(data, data.test_dataloader())[3]
    assert image[:, 5, 7].tolist() == [103, 153, 203]
    assert (image == 255).nonzero().tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]


@pytest.mark.parametrize(("module", "statistics"), PUBLISHED.items())
def test_statistics_are_the_published_ones(module, statistics):
    assert (module.mean, module.std) == statistics


def test_augmentation_changes_only_training_images(cifar_root):
    torch.manual_seed(0)
    data, plain = (make(CIFAR10DataModule, cifar_root, "fit", augment=augment) for augment in (True, False))
    train = torch.cat([as_bytes(data, data.train_dataloader()) for _ in range(20)])
    # The padding is black, and image 0 has a black red channel, so the test uses the blue channel (i + 100).
    padded = (train[:, 2] == 0).flatten(1).any(dim=1)
    assert 0.9 < padded.float().mean() < 1  # 1 - 1/81 of the crops include padding
    # The bright corner is on the left if not mirrored and on the right if mirrored, unless it was cropped.
    left, right = (train[:, 2, :5, :5] == 255).any(-1).any(-1), (train[:, 2, :5, -5:] == 255).any(-1).any(-1)
    assert min(left.sum(), right.sum()) > 20
    assert torch.equal(as_bytes(data, data.val_dataloader()), as_bytes(plain, plain.val_dataloader()))
    assert (as_bytes(plain, plain.train_dataloader())[:, :, 0, 0] == 255).all()


@pytest.mark.parametrize("module", [*GREY, *COLOUR])
def test_a_missing_root_is_named(module, tmp_path):
    name = module.dataset_class.__name__
    message = rf"^{name} is missing or incomplete in {tmp_path}/no.*download=True.*point root to the folder"
    with pytest.raises(DatasetError, match=message):
        make(module, tmp_path / "no")


def test_svhn_without_scipy_names_scipy(svhn_root, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(DatasetError, match=r"SVHN is missing or incomplete in .*scipy.*pip install scipy"):
        make(SVHNDataModule, svhn_root)


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


def test_a_damaged_file_is_rejected(cifar_root):
    with (cifar_root / "cifar-10-batches-py" / "data_batch_3").open("ab") as file:
        file.write(b"more")
    with pytest.raises(DatasetError, match="missing or incomplete"):
        CIFAR10DataModule(root=str(cifar_root)).setup("fit")


@pytest.mark.parametrize("module", [*GREY, *COLOUR])
def test_normalises_the_real_training_set(module, real_root):
    data = module(root=real_root, val_size=0, batch_size=100_000)
    try:
        data.setup("fit")
    except DatasetError:
        pytest.skip(f"no {module.__name__} below {real_root}")
    ((images, _),) = data.train_dataloader()
    tolerance = TOLERANCES.get(module, 5e-3)
    assert images.mean(dim=(0, 2, 3), dtype=torch.float64).abs().max() < tolerance
    assert (images.double().std(dim=(0, 2, 3)) - 1).abs().max() < tolerance


# -- out of distribution ----------------------------------------------------------------------------------------------


def test_ood_sets_have_the_in_distribution_transform(idx_root):
    data = make(MNISTDataModule, idx_root, ood=("fashionmnist", "kmnist"))
    assert data.ood_names == ("fashionmnist", "kmnist")
    test, *others = data.test_dataloader()
    for loader in others:  # all sets of fake_images hold the same bytes
        torch.testing.assert_close(torch.cat([x for x, _ in loader]), torch.cat([x for x, _ in test]))
        assert targets(loader) == [-1] * 10
    assert len(data.predict_dataloader()) == 3


def test_an_ood_set_of_a_different_shape_is_resized_with_a_message(idx_root, cifar_root, said):
    data = make(CIFAR10DataModule, cifar_root, ood=("mnist",))
    _, mnist = data.test_dataloader()
    assert "The images of mnist (the first is [1, 28, 28]) are resized" in said.text
    assert "[3, 32, 32]" in said.text
    assert torch.equal(as_bytes(data, mnist), torch.arange(100, 110).int()[:, None, None, None].expand(-1, 3, 32, 32))


def test_an_ood_set_of_the_same_shape_has_no_message(svhn_root, cifar_root, said):
    data = make(CIFAR10DataModule, cifar_root, ood=("svhn",))
    _, svhn = data.test_dataloader()
    assert "resized" not in said.text
    assert as_bytes(data, svhn)[:, :, 5, 5].tolist() == [[i, i + 50, i + 100] for i in range(100, 110)]


def test_an_ood_set_can_be_a_folder_of_images(idx_root, tmp_path):
    write_image_folder(tmp_path / "letters")
    data = make(MNISTDataModule, idx_root, ood=(str(tmp_path / "letters"),))
    assert data.ood_names == ("letters",)
    _, letters = data.test_dataloader()
    image = torch.zeros(3, 30, 40, dtype=torch.uint8)
    image[0] = 53  # the fourth dog
    image[:, 0, 0] = 255
    grey = functional.rgb_to_grayscale(image)
    expected = functional.center_crop(functional.resize(grey, [28], antialias=True), [28, 28])
    found = as_bytes(data, letters)
    assert found.shape == (20, 1, 28, 28)
    assert torch.equal(found[13], expected.int())


def test_ood_sets_can_have_a_different_root(idx_root, cifar_root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cifar-10-batches-py").rename(tmp_path / "elsewhere" / "cifar-10-batches-py")
    data = make(MNISTDataModule, idx_root, ood=("cifar10",), ood_root=str(tmp_path / "elsewhere"))
    assert len(data.test_dataloader()) == 2


@pytest.mark.parametrize(
    ("ood", "message"),
    [
        (("mnist",), r"ood=\['mnist'\] must contain sets other than mnist, with unique names"),
        (("svhn", "else/svhn"), r"ood=\['svhn', 'else/svhn'\] must contain sets other than mnist"),
    ],
)
def test_the_set_itself_and_duplicate_names_are_rejected(ood, message):
    with pytest.raises(HyperparameterError, match=message):
        MNISTDataModule(ood=ood)


def test_an_unknown_set_is_rejected(idx_root, tmp_path):
    data = make(MNISTDataModule, idx_root, ood=("notmnist",))
    with pytest.raises(
        DatasetError, match=r"ood: notmnist is neither a registered set \(cifar10, cifar100, .*svhn\) nor a folder"
    ):
        data.test_dataloader()


def test_scores_are_logged_by_the_names_of_the_sets(idx_root, quiet_trainer):
    data = make(FashionMNISTDataModule, idx_root, ood=("mnist", "kmnist"), corruptions=("fog",), severities=(3,))
    task = BayesClassifier(LeNet5(image_size=28), num_classes=10)
    (results, *_) = quiet_trainer().test(task, data, verbose=False)
    logged = {key for result in [results, *_] for key in result}
    assert {"ood/AUROC", "ood/mnist/AUROC", "ood/kmnist/AUROC", "shift/fog/3/cls/Acc"} <= logged
