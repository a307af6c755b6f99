"""scikit-learn's handwritten digits (UCI, Alpaydin & Kaynak 1998): 1797 images, no download.

Images are ``[1, 8, 8]``. The pixel values 0 to 16 are divided by 16 and normalised with the mean and standard deviation of
the training images:

    x = (pixel / 16 - 0.3050) / 0.3761

The split is the same in every run: 1097 training, 300 validation and 400 test images, stratified by class. There are two
out-of-distribution sets of 400 images each: greyscale patches of scikit-learn's two sample photographs, and the test digits
with shuffled pixels. They are scaled to [0, 1] and then normalised like the digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lightning_bayes.errors import DatasetError
from lightning_bayes.zoo.data.base import ImageDataModule
from lightning_bayes.zoo.registry import register_data
from lightning_bayes.zoo.transforms import ImageTransform

NUM_TEST: Final = 400
NUM_VAL: Final = 300
PATCH_ROWS: Final = 10  # 10 · 20 patches from each of two photographs, as many as test digits
PATCH_COLUMNS: Final = 20
_SIZE: Final = 8
_SEED: Final = 0  # of the split and the shuffled pixels; constant, so that all results use the same data


@register_data("digits")
@final
class DigitsDataModule(ImageDataModule):
    """Handwritten digits, 8 × 8 pixels, with two out-of-distribution sets.

    ``test_dataloader`` and ``predict_dataloader`` return loaders of ``[test, patches, shuffled]``, or only the test loader
    if ``eval_ood`` is False. Batches are ``(images [batch, 1, 8, 8], targets [batch])``; out-of-distribution targets are -1.
    ``images * std + mean`` is in [0, 1].

    Args:
        batch_size: Examples per batch, in all loaders.
        eval_ood: Whether to append the two out-of-distribution sets to the test loaders.
        num_workers: Worker processes per loader. The images are in memory, so 0 is fastest.
        predict_dir: A folder of unlabelled images to predict instead of the test images; white is a pixel value of 16.

    Raises:
        DatasetError: In ``setup``, if scikit-learn is not installed.
        DataError: In ``setup``, if the model has a different number of classes.
    """

    num_classes = 10
    in_channels = 1
    image_size = _SIZE
    class_names = tuple("0123456789")
    mean = 0.3050  # of the training images in [0, 1]
    std = 0.3761

    def __init__(
        self, batch_size: int = 64, eval_ood: bool = True, num_workers: int = 0, predict_dir: str | None = None
    ) -> None:
        transform = ImageTransform(_SIZE, (self.mean,), (self.std,))
        super().__init__(
            "digits", type(self).__name__, transform, None, batch_size, num_workers, predict_dir=predict_dir
        )
        self.ood_names = ("patches", "shuffled") if eval_ood else ()

    def read_sets(self, stage: str) -> None:
        """Load and split the data for all stages."""
        if hasattr(self, "train_set"):
            return
        images, targets = load_digits()
        train, val, test = split_indices(targets)
        self.train_set = self._dataset(images[train], targets[train])
        self.val_set = self._dataset(images[val], targets[val])
        self.test_set = self._dataset(images[test], targets[test])
        ood_images = [photo_patches(), shuffle_pixels(images[test])] if self.ood_names else []
        self.ood_sets = [self._dataset(images, torch.full((len(images),), -1)) for images in ood_images]

    def read_ood_sets(self) -> Sequence[Dataset[Any]]:
        """The patches and the shuffled digits, or nothing without ``eval_ood``."""
        return self.ood_sets

    def _dataset(self, images: Tensor, targets: Tensor) -> TensorDataset:
        return TensorDataset((images - self.mean) / self.std, targets)


def load_digits() -> tuple[Tensor, Tensor]:
    """All digits in scikit-learn's order: images in [0, 1], ``[1797, 1, 8, 8]``, and classes, ``[1797]``."""
    bunch = _sklearn_datasets().load_digits()
    images = torch.as_tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.as_tensor(bunch.target, dtype=torch.long)


def split_indices(targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of the fixed, stratified split: training ``[1097]``, validation ``[300]`` and test ``[400]``."""
    from sklearn.model_selection import train_test_split  # lazy: scikit-learn is an extra

    remaining, test = train_test_split(
        np.arange(len(targets)), test_size=NUM_TEST, stratify=targets, random_state=_SEED
    )
    train, val = train_test_split(remaining, test_size=NUM_VAL, stratify=targets[remaining], random_state=_SEED)
    return torch.as_tensor(train), torch.as_tensor(val), torch.as_tensor(test)


def photo_patches() -> Tensor:
    """Greyscale patches of the photographs china.jpg and flower.jpg, on a fixed grid over each photograph."""
    photos = _sklearn_datasets().load_sample_images().images
    return torch.cat([_grid_patches(torch.tensor(photo, dtype=torch.float32).mean(-1) / 255) for photo in photos])


def _grid_patches(grey: Tensor) -> Tensor:
    height, width = grey.shape
    tiles = grey.unfold(0, _SIZE, height // PATCH_ROWS).unfold(1, _SIZE, width // PATCH_COLUMNS)
    return tiles[:PATCH_ROWS, :PATCH_COLUMNS].reshape(-1, 1, _SIZE, _SIZE)


def shuffle_pixels(images: Tensor) -> Tensor:
    """Shuffle the pixels within each image, with a fixed seed. Keeps the brightness histogram and destroys shapes."""
    flat = images.flatten(1)
    keys = torch.rand(flat.shape, generator=torch.Generator().manual_seed(_SEED))
    return flat.gather(1, keys.argsort(dim=1)).reshape(images.shape)


def _sklearn_datasets() -> Any:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DatasetError(
            "The digits and photographs come with scikit-learn, which is not installed. "
            'Run: pip install "lightning-bayes[demo]"'
        ) from error
    return datasets
