"""Class folders of image files: reading, splitting, and errors for wrong folders and files."""

from __future__ import annotations

import pytest
import torch
from fake_images import write_image_folder
from of_classes import save_posterior
from posterior_around import mean_field_around
from torch import nn
from torchvision.models import ResNet18_Weights
from torchvision.transforms.v2 import functional

from lightning_bayes.errors import DataError, DatasetError, HyperparameterError
from lightning_bayes.zoo import BayesClassifier, create_model, load
from lightning_bayes.zoo.data import ImageFolderDataModule
from lightning_bayes.zoo.data.images import read_image

PLAIN = {"image_size": 30, "resize": None, "mean": (0.0, 0.0, 0.0), "std": (1 / 255,) * 3, "batch_size": 4}


def make(root, stage="fit", **kwargs):
    data = ImageFolderDataModule(root=str(root), **{**PLAIN, **kwargs})
    data.setup(stage)
    return data


def reds(loader):
    """The image indices, which are stored in the red channel."""
    return sorted(torch.cat([images[:, 0, 15, 15] for images, _ in loader]).round().int().tolist()) if loader else []


def classes(loader):
    return torch.cat([targets for _, targets in loader]).tolist()


# -- splits -----------------------------------------------------------------------------------------------------------


def test_one_folder_is_split_in_three_by_class(picture_root):
    data = make(picture_root, val_size=0.2, test_size=0.3)
    train, val, test = (reds(loader()) for loader in (data.train_dataloader, data.val_dataloader, data.test_dataloader))
    assert sorted(train + val + test) == [*range(10), *range(50, 60)]
    assert [len(train), len(val), len(test)] == [
        12,
        2,
        6,
    ]  # 0.2 of the seven remaining images of each class round to one
    for part in (train, val, test):
        assert sum(red >= 50 for red in part) == len(part) / 2
    again = make(picture_root, val_size=0.2, test_size=0.3)
    assert reds(again.val_dataloader()) == val
    assert data.class_names == ("cat", "dog")


def test_unlabelled_images_are_predicted_without_the_training_folder(tmp_path):
    write_image_folder(tmp_path / "new", count=2)
    data = make(tmp_path / "nowhere", "predict", predict_dir=str(tmp_path / "new"))
    loader = data.predict_dataloader()
    assert (reds(loader), classes(loader)) == ([0, 1, 50, 51], [-1] * 4)
    assert loader.dataset.file_names == [
        str(tmp_path / "new" / f"{name}.png") for name in ("cat/0", "cat/1", "dog/0", "dog/1")
    ]


def test_a_folder_without_images_is_named(tmp_path):
    (tmp_path / "new").mkdir()
    data = make(tmp_path, "predict", predict_dir=str(tmp_path / "new"))
    with pytest.raises(DatasetError, match=r"predict_dir: found no images below .*new\. Supported suffixes: \.jpg"):
        data.predict_dataloader()


def test_class_names_are_stored_in_module_checkpoint_and_posterior_file(picture_root, tmp_path, quiet_trainer):
    network = create_model("mlp", num_classes=2, in_channels=3, image_size=30, hidden=())
    module = BayesClassifier(network, num_classes=2)
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=0)
    trainer.fit(module, datamodule=ImageFolderDataModule(root=str(picture_root), **PLAIN))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    other = BayesClassifier(network, num_classes=2)
    other.on_load_checkpoint(torch.load(tmp_path / "last.ckpt", weights_only=True))
    assert module.class_names == other.class_names == ("cat", "dog")
    save_posterior(tmp_path / "q.safetensors", network, mean_field_around(network))
    assert load(tmp_path / "q.safetensors").class_names == ("cat", "dog")


def test_without_a_test_folder_val_is_the_test_set(tmp_path):
    write_image_folder(tmp_path / "train")
    write_image_folder(tmp_path / "val", count=3)
    data = make(tmp_path, val_size=0.2)
    assert reds(data.test_dataloader()) == [0, 1, 2, 50, 51, 52]
    assert len(data.val_set) == 4
    assert sorted(reds(data.train_dataloader()) + reds(data.val_dataloader())) == [*range(10), *range(50, 60)]


def test_with_a_test_folder_val_is_for_validation(tmp_path):
    for name, count in (("train", 4), ("val", 3), ("test", 2)):
        write_image_folder(tmp_path / name, count=count)
    data = make(tmp_path)
    assert [len(data.train_set), len(data.val_set), len(data.test_set)] == [8, 6, 4]


def test_without_validation_there_is_no_loader(picture_root):
    assert make(picture_root, val_size=0).val_dataloader() == []


def test_few_shots_are_balanced(picture_root):
    data = make(picture_root, shots=3)
    assert sorted(classes(data.train_dataloader())) == [0, 0, 0, 1, 1, 1]


def test_sizes_are_logged(picture_root, said):
    make(picture_root, val_size=4, test_size=6)
    assert f"{picture_root}: 2 classes, 10 training images, 4 validation images, 6 test images." in said.text


# -- images -----------------------------------------------------------------------------------------------------------


def test_the_default_input_matches_torchvisions_weights(picture_root):
    data = ImageFolderDataModule(root=str(picture_root), test_size=0.5)
    data.setup("test")
    preset = ResNet18_Weights.IMAGENET1K_V1.transforms()
    for index in (0, 7):
        path = data.test_set.images[index]
        ours, theirs = data.test_set[index][0], preset(read_image(path))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.0176)  # one of 255 levels, by different rounding


def test_greyscale_models_get_greyscale_images(picture_root):
    data = make(picture_root, mean=(0.5,), std=(0.25,))
    (images, _), *_ = data.val_dataloader()
    assert images.shape[1:] == (1, 30, 30)
    assert data.in_channels == 1


def test_augmentation_changes_only_training_images(picture_root):
    torch.manual_seed(0)
    data, plain = make(picture_root, augment=True), make(picture_root)
    assert data.data_augmentation_factor == 5.0
    (images, _), *_ = data.train_dataloader()
    assert images.shape == (4, 3, 30, 30)
    corners = torch.cat([images[:, 1, 0, 0] for _ in range(5) for images, _ in data.train_dataloader()])
    assert 0 < (corners > 0).float().mean() < 0.9  # most crops cut off the white corner, or mirror it
    for one, other in zip(data.val_set, plain.val_set, strict=True):
        assert torch.equal(one[0], other[0])


def test_a_corrupted_test_set_is_corrupted_as_the_model_sees_it(picture_root):
    data = make(picture_root)
    (images, targets), *_ = data.corrupted_dataloader("brightness", 2)
    (plain, same), *_ = data.test_dataloader()
    assert torch.equal(targets, same)
    inside = (plain + 0.1 * 255).clamp(max=255)
    assert (images - inside).abs().max() < 0.51


def test_ood_folders_have_the_same_transform(picture_root, tmp_path):
    write_image_folder(tmp_path / "letters", classes=("a",), count=2)
    data = make(picture_root, ood=(str(tmp_path / "letters"),))
    _, letters = data.test_dataloader()
    (images, targets), *_ = letters
    expected = functional.center_crop(
        functional.resize(read_image(tmp_path / "letters" / "a" / "0.png"), [30]), [30, 30]
    )
    assert torch.equal(images[0].round().to(torch.uint8), expected)
    assert targets.tolist() == [-1, -1]


# -- bad input --------------------------------------------------------------------------------------------------------


def test_all_damaged_files_are_listed_at_the_start(picture_root):
    whole = (picture_root / "dog" / "3.png").read_bytes()
    damage = {"dog/3.png": whole[: len(whole) // 2], "cat/1.png": b"not an image", "cat/2.png": b""}
    for name, content in damage.items():
        (picture_root / name).write_bytes(content)
    with pytest.raises(DataError, match="3 of 20 files cannot be read as images") as caught:
        make(picture_root)
    assert all(f"{picture_root / name} (" in str(caught.value) for name in damage)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_is_damaged_inside_is_named_when_it_is_read(picture_root, workers):
    path = picture_root / "dog" / "3.png"
    content = bytearray(path.read_bytes())
    content[40:60] = bytes(20)
    path.write_bytes(content)
    data = make(picture_root, val_size=0, test_size=0, num_workers=workers)
    with pytest.raises(DataError, match=rf"{path} cannot be read as an image \(.*\)\. Replace the file, or remove it"):
        list(data.train_dataloader())


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DatasetError, match=rf"{tmp_path}/no does not contain one folder of images per class"):
        make(tmp_path / "no")


def test_a_folder_without_class_folders_is_named(tmp_path):
    with pytest.raises(
        DatasetError, match=rf"{tmp_path} does not contain one folder .*ROOT/CLASS, or into ROOT/train/CLASS"
    ):
        make(tmp_path)


def test_empty_class_folders_are_named(picture_root):
    for name in ("bird", "eel"):
        (picture_root / name).mkdir()
    with pytest.raises(DatasetError, match=r"no valid file for the classes bird, eel.*remove empty folders"):
        make(picture_root)


def test_missing_and_unknown_class_folders_of_the_test_set_are_listed(tmp_path):
    write_image_folder(tmp_path / "train", classes=("ant", "bee", "cat"), count=3)
    write_image_folder(tmp_path / "val", classes=("bee", "dog"), count=3)
    with pytest.raises(DataError, match=rf"{tmp_path}/val must have the same class .*missing: ant, cat; unknown: dog"):
        make(tmp_path)


def test_a_failed_setup_can_be_repeated(tmp_path):
    write_image_folder(tmp_path / "train", classes=("cat", "dog"), count=3)
    write_image_folder(tmp_path / "val", classes=("cat",), count=3)
    data = ImageFolderDataModule(root=str(tmp_path), **PLAIN)
    for _ in range(2):
        with pytest.raises(DataError, match=r"missing: dog"):
            data.setup("fit")
    write_image_folder(tmp_path / "val", classes=("dog",), count=3)
    data.setup("fit")
    assert (data.class_names, len(data.train_set)) == (("cat", "dog"), 4)


def test_a_model_with_a_different_number_of_classes_is_rejected_before_training(picture_root, quiet_trainer):
    task = BayesClassifier(nn.Sequential(nn.Flatten(), nn.Linear(2700, 10)), num_classes=10)
    data = ImageFolderDataModule(root=str(picture_root), **PLAIN)
    with pytest.raises(DataError, match=r"pictures has 2 classes \(cat, dog\), but the model has num_classes=10"):
        quiet_trainer(max_epochs=1).fit(task, data)


@pytest.mark.parametrize("sizes", [{"val_size": 0.95}, {"test_size": 30}, {"shots": 9}])
def test_sizes_that_leave_no_training_images_are_rejected(picture_root, sizes):
    with pytest.raises(HyperparameterError):
        make(picture_root, **sizes)
