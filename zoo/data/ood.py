"""Sets out of distribution: other image sets by name, or folders of images, with the transform of the training set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_bayes.errors import DatasetError, HyperparameterError
from lightning_bayes.zoo.data.images import TransformedImages, image_files, read_image
from lightning_bayes.zoo.registry import DATA
from lightning_bayes.zoo.transforms import ImageTransform


def named_sets() -> dict[str, Callable[[str], Tensor]]:
    """The registered sets that can be named as out of distribution.

    Returns:
        By name without underscores, a function from the root folder to the bytes of the test images.
    """
    return {_plain(name): module.test_images for name, module in sorted(DATA.items()) if hasattr(module, "test_images")}


def _plain(name: str) -> str:
    return name.replace("_", "")


def ood_names(entries: Iterable[str], own: str) -> tuple[str, ...]:
    """The names of sets out of distribution in results.

    Args:
        entries: Names of sets or folders.
        own: Name of the set in distribution.

    Returns:
        The name of each set or the last part of its folder.

    Raises:
        HyperparameterError: If two have the same name, or one is the set in distribution.

    Example:
        >>> ood_names(["svhn", "pictures/letters"], own="cifar10")
        ('svhn', 'letters')
    """
    names = tuple(Path(entry).name for entry in entries)
    if len(set(names)) < len(names) or _plain(own) in map(_plain, names):
        raise HyperparameterError(
            f"ood={list(entries)} must name sets other than {own}, each of another name. Rename a folder, or leave one out."
        )
    return names


def ood_set(entry: str, root: str, transform: ImageTransform) -> TransformedImages:
    """The images of a set out of distribution, with the transform of the set in distribution and targets -1.

    Args:
        entry: Name of a set, whose test images are taken, or a folder with images at any depth.
        root: Folder of the named sets.
        transform: That of the set in distribution.

    Returns:
        The set.

    Raises:
        DatasetError: If there is neither such a set nor a folder with images.
    """
    known = named_sets()
    if _plain(entry) in known:
        images: Tensor | list[Path] = known[_plain(entry)](root)
    else:
        images = image_files(entry)
    if len(images) == 0:
        raise DatasetError(
            f"ood: {entry} is neither a known set ({', '.join(known)}) nor a folder with images. Looked for "
            f"images below {Path(entry).absolute()}."
        )
    first = images[0] if isinstance(images, Tensor) else read_image(images[0])
    wanted = [len(transform.mean), transform.image_size, transform.image_size]
    if list(first.shape) != wanted:
        rank_zero_info(
            f"The images of {entry} ({list(first.shape)} the first) are resized, cropped and brought to the channels of the "
            f"training images, {wanted}."
        )
    return TransformedImages(images, [-1] * len(images), transform)
