"""Layouts of image folders that users have: names of splits, archives, and classes that share a split's name."""

from __future__ import annotations

import logging

import pytest
from fake_images import write_image_folder

from lightning_bayes.errors import DatasetError
from lightning_bayes.zoo import ImageFolderDataModule


def sizes(root):
    """Training, validation and test images, with the class names."""
    data = ImageFolderDataModule(root=str(root), image_size=8, resize=8)
    data.setup("fit")
    return len(data.train_set), len(data.val_set), len(data.test_set), data.class_names


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [
        ("Train", "Val", "Test"),
        ("train", "valid", "test"),
        ("train", "validation", "test"),
        ("TRAINING", "dev", "Testing"),
        ("training", "eval", "testing"),
        ("training_set", "validation_set", "test_set"),
        ("seg_train/seg_train", "seg_dev/seg_dev", "seg_test/seg_test"),
        ("Train Images", "Val Images", "Test Images"),
    ],
)
def test_usual_names_of_splits_are_known_in_any_case(tmp_path, train, val, test):
    for name, count in ((train, 4), (val, 3), (test, 2)):
        write_image_folder(tmp_path / name, count=count)
    assert sizes(tmp_path) == (8, 6, 4, ("cat", "dog"))


def test_training_and_test_folders_leave_validation_to_a_split(tmp_path):
    write_image_folder(tmp_path / "Training", count=10)
    write_image_folder(tmp_path / "Testing", count=3)
    assert sizes(tmp_path) == (18, 2, 6, ("cat", "dog"))


@pytest.mark.parametrize("name", ["train", "pictures"])
def test_a_single_inner_folder_of_classes_is_split(tmp_path, name):
    write_image_folder(tmp_path / name, count=10)
    assert sizes(tmp_path) == (14, 2, 4, ("cat", "dog"))


def test_folders_of_an_unpacked_archive_are_entered(tmp_path):
    for name in ("train", "test"):
        write_image_folder(tmp_path / "archive" / "pictures" / name, count=10)
    (tmp_path / "__MACOSX").mkdir()
    assert sizes(tmp_path) == (18, 2, 20, ("cat", "dog"))


def test_hidden_folders_are_no_classes(tmp_path):
    write_image_folder(tmp_path, count=10)
    (tmp_path / ".ipynb_checkpoints").mkdir()
    assert sizes(tmp_path)[3] == ("cat", "dog")


def test_a_class_can_be_called_train(tmp_path):
    write_image_folder(tmp_path, classes=("bus", "train"), count=10)
    assert sizes(tmp_path) == (14, 2, 4, ("bus", "train"))


def test_words_of_splits_in_names_of_classes_are_no_splits(tmp_path):
    write_image_folder(tmp_path, classes=("test tube", "train station"), count=10)
    assert sizes(tmp_path)[3] == ("test tube", "train station")


def test_folders_that_hold_the_same_folders_are_no_classes(tmp_path):
    for name in ("fold 1", "fold 2"):
        write_image_folder(tmp_path / name, count=3)
    with pytest.raises(DatasetError, match=r"are fold 1, fold 2\. Splits need"):
        sizes(tmp_path)


def test_further_folders_beside_splits_are_named(tmp_path, caplog):
    for name in ("train", "test", "holdout"):
        write_image_folder(tmp_path / name, count=4)
    with caplog.at_level(logging.INFO):
        assert sizes(tmp_path)[2] == 8
    assert "the folders holdout are no splits and are not read" in caplog.text


@pytest.mark.parametrize("names", [("val", "test"), ("train", "val", "dev"), ("Train", "train")])
def test_splits_that_are_missing_or_double_are_refused_with_what_was_found(tmp_path, names):
    for name in names:
        write_image_folder(tmp_path / name, count=3)
    with pytest.raises(
        DatasetError, match=f"The folders in {tmp_path} are {', '.join(sorted(names))}.*train or training"
    ):
        sizes(tmp_path)


@pytest.mark.parametrize("other", ["train/cat", "cat"])
def test_a_test_folder_without_classes_is_no_class_and_no_split(tmp_path, other):
    write_image_folder(tmp_path / other, classes=("",), count=3)
    write_image_folder(tmp_path / "test", classes=("",), count=3)
    with pytest.raises(DatasetError, match=r"unlabelled images are predicted with predict_dir"):
        sizes(tmp_path)
