from __future__ import annotations

import sys
import zlib

import numpy as np
import pytest
import torch
from sklearn import datasets
from torch import nn
from torch.utils.data import RandomSampler

from lightning_bayes.errors import DataError, DatasetError
from lightning_bayes.zoo import BayesClassifier
from lightning_bayes.zoo.data import DigitsDataModule
from lightning_bayes.zoo.data.digits import photo_patches, shuffle_pixels, split_indices


@pytest.fixture(scope="module")
def data():
    module = DigitsDataModule(batch_size=50)
    module.setup("fit")
    return module


def test_the_split_covers_every_digit_once():
    splits = split_indices(torch.as_tensor(datasets.load_digits().target))
    assert [len(part) for part in splits] == [1097, 300, 400]
    assert sorted(torch.cat(splits).tolist()) == list(range(1797))


def test_the_split_never_changes():
    splits = split_indices(torch.as_tensor(datasets.load_digits().target))
    # If these checksums change, all results on digits change, and the changelog must say so.
    checksums = [zlib.crc32(part.numpy().astype("<i8").tobytes()) for part in splits]
    assert checksums == [3036624866, 1524547408, 1591968685]


def test_loading_does_not_change_the_global_generators():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    DigitsDataModule().setup("fit")
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


def test_the_split_is_stratified(data):
    share = torch.bincount(torch.as_tensor(datasets.load_digits().target)) / 1797
    for part in (data.train_set, data.val_set, data.test_set):
        counts = torch.bincount(part.tensors[1], minlength=10)
        assert (counts - share * len(part)).abs().max() < 2


def test_images_are_normalised_as_stated(data):
    digits = datasets.load_digits()
    train, _, test = split_indices(torch.as_tensor(digits.target))
    for part, indices in ((data.train_set, train), (data.test_set, test)):
        expected = (digits.images[indices] / 16 - 0.3050) / 0.3761
        np.testing.assert_allclose(part.tensors[0].numpy()[:, 0], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(part.tensors[1].numpy(), digits.target[indices])


def test_the_training_images_have_zero_mean_and_unit_variance(data):
    images = data.train_set.tensors[0].double()
    assert images.mean().abs() < 5e-4
    assert abs(images.std() - 1) < 5e-4


def test_patches_are_cut_from_both_photographs_on_a_grid_without_overlap():
    patches = photo_patches()
    assert patches.shape == (400, 1, 8, 8)
    photos = datasets.load_sample_images().images  # [427, 640, 3] each
    for k in (0, 21, 199, 200, 399):
        row, column = divmod(k % 200, 20)
        cut = photos[k // 200][42 * row : 42 * row + 8, 32 * column : 32 * column + 8].astype(float)
        np.testing.assert_allclose(patches[k, 0].numpy(), cut.mean(-1) / 255, rtol=1e-6)


def test_shuffled_digits_keep_their_pixels_in_a_different_order(data):
    original = data.test_set.tensors[0].flatten(1)
    shuffled = data.ood_sets[1].tensors[0].flatten(1)
    assert torch.equal(original.sort(dim=1).values, shuffled.sort(dim=1).values)
    assert (original != shuffled).any(dim=1).all()


def test_each_image_has_its_own_fixed_permutation():
    images = torch.arange(64.0).reshape(1, 1, 8, 8).repeat(3, 1, 1, 1)
    shuffled = shuffle_pixels(images)
    assert not torch.equal(shuffled[0], shuffled[1])
    assert torch.equal(shuffled, shuffle_pixels(images))


def test_loaders_return_the_test_set_followed_by_the_named_sets(data):
    loaders = data.test_dataloader()
    assert data.ood_names == ("patches", "shuffled")
    assert [len(loader.dataset) for loader in loaders] == [400, 400, 400]
    assert torch.equal(next(iter(loaders[0]))[0], data.test_set.tensors[0][:50])
    torch.testing.assert_close(next(iter(loaders[1]))[0] * data.std + data.mean, photo_patches()[:50])
    assert next(iter(loaders[2]))[1].eq(-1).all()
    assert len(data.predict_dataloader()) == 3


def test_only_training_is_shuffled(data):
    loaders = [data.train_dataloader(), data.val_dataloader(), *data.test_dataloader()]
    assert [isinstance(loader.sampler, RandomSampler) for loader in loaders] == [True, False, False, False, False]


def test_without_ood_there_is_one_test_loader():
    module = DigitsDataModule(eval_ood=False)
    module.setup("test")
    assert module.ood_names == ()
    assert len(module.test_dataloader().dataset) == 400


def test_a_second_setup_keeps_the_data(data):
    before = data.train_set
    data.setup("test")
    assert data.train_set is before


def test_attributes_describe_the_batches(data):
    images, targets = next(iter(data.train_dataloader()))
    assert images.shape == (50, data.in_channels, data.image_size, data.image_size)
    assert int(targets.max()) == data.num_classes - 1 == len(data.class_names) - 1


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)  # makes `import sklearn` raise ImportError
    with pytest.raises(
        DatasetError, match=r'scikit-learn, which is not installed\. Run: pip install "lightning-bayes\[demo\]"'
    ):
        DigitsDataModule().setup("fit")


def test_a_model_with_a_different_number_of_classes_is_rejected(quiet_trainer):
    task = BayesClassifier(nn.Sequential(nn.Flatten(), nn.Linear(64, 12)), num_classes=12)
    with pytest.raises(DataError, match=r"DigitsDataModule has 10 classes .*, but the model has num_classes=12"):
        quiet_trainer(max_epochs=1).fit(task, datamodule=DigitsDataModule())


def test_digits_cannot_be_corrupted(data):
    with pytest.raises(DataError, match="no test images of eight bits, which corruptions need"):
        data.corrupted_dataloader("fog", 3)
