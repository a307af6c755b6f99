"""CIFAR-100, SVHN and KMNIST, and out-of-distribution image sets."""

from __future__ import annotations

import sys

import pytest
import torch
from fake_images import write_image_folder
from torchvision.transforms.v2 import functional

from lightning_bayes.errors import DatasetError, HyperparameterError
from lightning_bayes.zoo import BayesClassifier, LeNet5
from lightning_bayes.zoo.data import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    FashionMNISTDataModule,
    KMNISTDataModule,
    MNISTDataModule,
    SVHNDataModule,
)


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


# -- each set ---------------------------------------------------------------------------------------------------------


def test_cifar100_reads_the_fine_classes(cifar100_root):
    data = make(CIFAR100DataModule, cifar100_root)
    assert as_bytes(data, data.test_dataloader())[:, :, 9, 9].tolist() == [
        [i, i + 50, i + 100] for i in range(100, 110)
    ]
    assert targets(data.test_dataloader()) == [i * 7 % 100 for i in range(100, 110)]
    assert len(set(data.class_names)) == data.num_classes == 100
    assert list(data.class_names) == sorted(data.class_names)  # as in its meta file


def test_svhn_reads_its_digits_with_zero_as_zero(svhn_root):
    data = make(SVHNDataModule, svhn_root)
    assert as_bytes(data, data.test_dataloader())[:, :, 9, 9].tolist() == [
        [i, i + 50, i + 100] for i in range(100, 110)
    ]
    assert targets(data.test_dataloader()) == list(range(10))
    data.setup("fit")
    seen = torch.cat([as_bytes(data, data.train_dataloader()), as_bytes(data, data.val_dataloader())])
    assert sorted(seen[:, 0, 0, 0].tolist()) == list(range(20))


def test_svhn_without_scipy_names_scipy(svhn_root, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(DatasetError, match=r"SVHN is missing or incomplete in .*scipy.*pip install scipy"):
        make(SVHNDataModule, svhn_root)


def test_kmnist_is_read_like_mnist(idx_root):
    data = make(KMNISTDataModule, idx_root)
    assert as_bytes(data, data.test_dataloader())[:, 0, 9, 9].tolist() == list(range(100, 110))
    assert len(data.class_names) == 10


@pytest.mark.parametrize("module", [CIFAR100DataModule, SVHNDataModule, KMNISTDataModule])
def test_a_missing_root_is_named(module, tmp_path):
    name = module.dataset_class.__name__
    with pytest.raises(
        DatasetError,
        match=rf"{name} is missing or incomplete in {tmp_path}/no.*download=True.*point root to the folder",
    ):
        make(module, tmp_path / "no")


@pytest.mark.parametrize("module", [CIFAR100DataModule, SVHNDataModule, KMNISTDataModule])
def test_normalises_the_real_training_set(module, real_root):
    data = module(root=real_root, val_size=0, batch_size=100_000)
    try:
        data.setup("fit")
    except DatasetError:
        pytest.skip(f"no {module.__name__} below {real_root}")
    ((images, _),) = data.train_dataloader()
    assert images.mean(dim=(0, 2, 3), dtype=torch.float64).abs().max() < 5e-3
    assert (images.double().std(dim=(0, 2, 3)) - 1).abs().max() < 5e-3


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
