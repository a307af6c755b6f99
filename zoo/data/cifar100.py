"""CIFAR-100 (Krizhevsky 2009): 50 000 training and 10 000 colour test images, 32 × 32, a hundred classes.

Normalised with the mean and standard deviation of its 50 000 training images, per channel.
"""

from __future__ import annotations

from typing import Final, final

from torchvision import datasets

from lightning_bayes.zoo.data.vision import VisionDataModule
from lightning_bayes.zoo.registry import register_data

_CLASSES: Final = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly "
    "camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup "
    "dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower "
    "leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid "
    "otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray "
    "road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar "
    "sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle "
    "wardrobe whale willow_tree wolf woman worm "
)


@register_data("cifar100")
@final
class CIFAR100DataModule(VisionDataModule):
    """CIFAR-100 from torchvision: images ``[batch, 3, 32, 32]``, the hundred fine classes, in ``cifar-100-python``.

    See `VisionDataModule` for arguments, errors and loaders. With ``augment``, callbacks use a
    ``data_augmentation_factor`` of 10, as in Osawa et al. 2019 on CIFAR-10 (https://arxiv.org/abs/1906.02506).

    Example:
        >>> data = CIFAR100DataModule(root="data", shots=5)  # five training images of each class
        >>> data.num_classes, data.class_names[-1]
        (100, 'worm')
    """

    dataset_class = datasets.CIFAR100
    expected_files = "cifar-100-python with train, test and meta"
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)
    num_classes = 100
    in_channels = 3
    image_size = 32
    class_names = tuple(_CLASSES.split())
    mirrors = True
