"""Out-of-distribution sets: registered image sets or folders of images, with the transform of the training set."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_bayes.errors import DatasetError, HyperparameterError
from lightning_bayes.zoo.data.images import ImageSet, image_files, read_image, unlabelled
from lightning_bayes.zoo.registry import DATA
from lightning_bayes.zoo.transforms import ImageTransform


def _plain(name: str) -> str:
    return name.replace("_", "")


def ood_names(entries: Iterable[str], in_distribution: str) -> tuple[str, ...]:
    """Names of the out-of-distribution sets in metric keys."""
    names = tuple(Path(entry).name for entry in entries)
    if len(set(names)) < len(names) or _plain(in_distribution) in map(_plain, names):
        raise HyperparameterError(
            f"ood={list(entries)} must contain sets other than {in_distribution}, with unique names. Rename a folder, or "
            "remove a set."
        )
    return names


def ood_set(entry: str, root: str, transform: ImageTransform) -> ImageSet:
    """The images of an out-of-distribution set, with targets -1."""
    registered = {_plain(name): module for name, module in sorted(DATA.items()) if hasattr(module, "test_images")}
    if _plain(entry) in registered:
        images: Tensor | list[Path] = registered[_plain(entry)].test_images(root)
    else:
        images = image_files(entry)
    if len(images) == 0:
        raise DatasetError(
            f"ood: {entry} is neither a registered set ({', '.join(registered)}) nor a folder with images. No images were "
            f"found below {Path(entry).absolute()}."
        )
    first = images[0] if isinstance(images, Tensor) else read_image(images[0])
    input_shape = [len(transform.mean), transform.image_size, transform.image_size]
    if list(first.shape) != input_shape:
        rank_zero_info(
            f"The images of {entry} (the first is {list(first.shape)}) are resized, cropped and converted to the shape of "
            f"the training images, {input_shape}."
        )
    return unlabelled(images, transform)
