"""The image sets of torchvision. Each is normalised with the mean and standard deviation of its training images.

    mnist          handwritten digits (LeCun, Cortes & Burges)          60 000 training, 10 000 test images, grey, 28 × 28
    fashion_mnist  clothing (Xiao et al. 2017, arxiv.org/abs/1708.07747)                    as MNIST
    kmnist         old Japanese characters (Clanuwat et al. 2018, arxiv.org/abs/1812.01718) as MNIST
    cifar10        ten classes of photographs (Krizhevsky 2009)         50 000 training, 10 000 test images, colour, 32 × 32
    cifar100       a hundred classes (Krizhevsky 2009)                                      as CIFAR-10
    svhn           house numbers (Netzer et al. 2011)                   73 257 training, 26 032 test images, colour, 32 × 32

The statistics of KMNIST are commonly used values; other code uses 0.1904 and 0.3475, which differ by less than 1 %.
"""

from __future__ import annotations

from typing import Final, final

from torchvision import datasets

from lightning_bayes.zoo.data.vision import VisionDataModule
from lightning_bayes.zoo.registry import register_data

_CIFAR100_CLASSES: Final = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly "
    "camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup "
    "dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower "
    "leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid "
    "otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray "
    "road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar "
    "sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle "
    "wardrobe whale willow_tree wolf woman worm"
)
_IDX_FILES: Final = "{train,t10k}-images-idx3-ubyte and {train,t10k}-labels-idx1-ubyte, unpacked, in"


@register_data("mnist")
@final
class MNISTDataModule(VisionDataModule):
    """MNIST: images ``[batch, 1, 28, 28]``, ten digits. See `VisionDataModule` for arguments, errors and loaders."""

    dataset_class = datasets.MNIST
    expected_files = f"{_IDX_FILES} MNIST/raw"
    mean, std = (0.1307,), (0.3081,)
    in_channels, image_size = 1, 28
    class_names = tuple("0123456789")


@register_data("fashion_mnist")
@final
class FashionMNISTDataModule(VisionDataModule):
    """FashionMNIST: images ``[batch, 1, 28, 28]``, ten kinds of clothing. See `VisionDataModule`."""

    dataset_class = datasets.FashionMNIST
    expected_files = f"{_IDX_FILES} FashionMNIST/raw"
    mean, std = (0.2860,), (0.3530,)
    in_channels, image_size = 1, 28
    class_names = tuple(datasets.FashionMNIST.classes)
    mirrors = True


@register_data("kmnist")
@final
class KMNISTDataModule(VisionDataModule):
    """KMNIST: images ``[batch, 1, 28, 28]``, ten characters. See `VisionDataModule`."""

    dataset_class = datasets.KMNIST
    expected_files = f"{_IDX_FILES} KMNIST/raw"
    mean, std = (0.1918,), (0.3483,)
    in_channels, image_size = 1, 28
    class_names = tuple(datasets.KMNIST.classes)


@register_data("cifar10")
@final
class CIFAR10DataModule(VisionDataModule):
    """CIFAR-10: images ``[batch, 3, 32, 32]``, ten classes. See `VisionDataModule`."""

    dataset_class = datasets.CIFAR10
    expected_files = "cifar-10-batches-py with data_batch_1 to data_batch_5, test_batch and batches.meta"
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    in_channels, image_size = 3, 32
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    mirrors = True


@register_data("cifar100")
@final
class CIFAR100DataModule(VisionDataModule):
    """CIFAR-100: images ``[batch, 3, 32, 32]``, the hundred fine classes. See `VisionDataModule`."""

    dataset_class = datasets.CIFAR100
    expected_files = "cifar-100-python with train, test and meta"
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    num_classes, in_channels, image_size = 100, 3, 32
    class_names = tuple(_CIFAR100_CLASSES.split())
    mirrors = True


class SVHN(datasets.SVHN):  # type: ignore[misc]  # torchvision has no types
    """SVHN with the constructor and the name of the labels of torchvision's other sets."""

    def __init__(self, root: str, train: bool, download: bool) -> None:
        super().__init__(root, split="train" if train else "test", download=download)
        self.targets = self.labels


@register_data("svhn")
@final
class SVHNDataModule(VisionDataModule):
    """SVHN: images ``[batch, 3, 32, 32]``, ten digits; torchvision needs SciPy to read it. See `VisionDataModule`."""

    dataset_class = SVHN
    expected_files = "train_32x32.mat and test_32x32.mat, and install SciPy (pip install scipy)"
    mean, std = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)
    in_channels, image_size = 3, 32
    class_names = tuple("0123456789")
