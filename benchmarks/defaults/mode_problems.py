"""Small image problems with normalisation layers, each with an ordinary module, optimizer and schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from benchmarks.defaults.users import UserModule

TRAIN, VALIDATION, TEST, OOD = 5000, 1000, 4000, 2000
Configure = Callable[[nn.Module, int, int], OptimizerLRScheduler]  # of the module, the epochs and the updates


class Images(NamedTuple):
    """Standardised images, with labels."""

    train_x: Tensor
    train_y: Tensor
    val_x: Tensor
    val_y: Tensor
    test_x: Tensor
    test_y: Tensor
    ood_x: Tensor


class Block(nn.Module):
    """Two convolutions beside a shortcut (He et al. 2016)."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module], is_normed_beside: bool = True
    ) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.extend([norm(outputs)] if is_normed_beside else [])

    def forward(self, x: Tensor) -> Tensor:
        """Half the size where the stride is 2."""
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def resnet(norm: Callable[[int], nn.Module], channels: int = 3, is_normed_beside: bool = True) -> nn.Module:
    """ResNet with eight layers: a block each of 16, 32 and 64 channels (He et al. 2016, section 4.2, with n = 1)."""
    stem = (nn.Conv2d(channels, 16, 3, 1, 1, bias=False), norm(16), nn.ReLU())
    sizes = ((16, 16, 1), (16, 32, 2), (32, 64, 2))
    blocks = (Block(*size, norm, is_normed_beside) for size in sizes)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class ViT(nn.Module):
    """Sixteen patches, three layers of 64 units, LayerNorm first."""

    def __init__(self, channels: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, 64, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, 64))
        layers = [nn.TransformerEncoderLayer(64, 4, 128, 0.0, F.gelu, batch_first=True, norm_first=True) for _ in "123"]
        self.layers, self.norm, self.head = nn.Sequential(*layers), nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, 10]``."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        logits: Tensor = self.head(self.norm(self.layers(tokens)).mean(1))
        return logits


def _adamw_onecycle(module: nn.Module, epochs: int, updates: int) -> OptimizerLRScheduler:
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=updates)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def cosine(optimizer: torch.optim.Optimizer, epochs: int) -> OptimizerLRScheduler:
    """An optimizer with a cosine schedule."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule}}


def _sgd_cosine(module: nn.Module, epochs: int, updates: int) -> OptimizerLRScheduler:
    return cosine(torch.optim.SGD(module.parameters(), 0.05, momentum=0.9, weight_decay=5e-4), epochs)


def _adamw_cosine(module: nn.Module, epochs: int, updates: int) -> OptimizerLRScheduler:
    return cosine(torch.optim.AdamW(module.parameters(), 1e-3, weight_decay=0.01), epochs)


@dataclass(frozen=True)
class ModeProblem:
    """Images, a network, and how the user trains it."""

    network: Callable[[], nn.Module]
    configure: Configure
    is_fashion: bool = False
    augmented: bool = False
    epochs: int = 20
    batch: int = 128
    precision: Any = "bf16-mixed"

    def load(self, root: Path, split: int) -> Images:
        """The images of one split, drawn with the generator of its number."""
        generator = torch.Generator().manual_seed(split)
        train, test, ood = _fashion(root) if self.is_fashion else cifar_images(root)
        first, second = (torch.randperm(len(y), generator=generator) for _, y in (train, test))
        rows = first[:TRAIN], first[TRAIN : TRAIN + VALIDATION], second[:TEST]
        parts = [part[index] for (x, y), index in zip((train, train, test), rows, strict=True) for part in (x, y)]
        mean, std = parts[0].mean((0, 2, 3), keepdim=True), parts[0].std((0, 2, 3), keepdim=True)
        chosen = ood[torch.randperm(len(ood), generator=generator)[:OOD]]
        images = [(x - mean) / std if x.dim() == 4 else x for x in (*parts, chosen)]
        return Images(*images)

    def module(self, epochs: int) -> UserModule:
        """The user's module with new weights, for a fit of so many epochs."""
        net = self.network().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # of nn.Module
        configure = partial(self.configure, epochs=epochs, updates=epochs * (TRAIN // self.batch))
        return UserModule(net, configure, augment=cropped_and_flipped if self.augmented else lambda x: x)


def cropped_and_flipped(x: Tensor) -> Tensor:
    """Random crops after four pixels of padding, and random flips, drawn for each image."""
    count, size = len(x), x.shape[-1]
    padded = F.pad(x, (4, 4, 4, 4))
    shifts = torch.randint(9, (2, count, 1)) + torch.arange(size)
    flipped = torch.where(torch.rand(count, 1) < 0.5, shifts[1], shifts[1].flip(1))
    rows, columns = shifts[0][:, None, :, None].to(x.device), flipped[:, None, None, :].to(x.device)
    images, channels = (torch.arange(size, device=x.device) for size in x.shape[:2])
    return padded[images[:, None, None, None], channels[:, None, None], rows, columns]


def cifar_images(root: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Training and test images of CIFAR-10 with labels, and images of SVHN, in [0, 1]."""
    from scipy.io import loadmat  # SVHN's format
    from torchvision.datasets import CIFAR10

    sets = [CIFAR10(str(root), train) for train in (True, False)]
    train, test = [(torch.tensor(s.data).permute(0, 3, 1, 2) / 255, torch.tensor(s.targets)) for s in sets]
    numbers = torch.tensor(loadmat(str(root / "test_32x32.mat"))["X"]).permute(3, 2, 0, 1) / 255
    return train, test, numbers


def _fashion(root: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    from torchvision.datasets import MNIST, FashionMNIST

    sets = [FashionMNIST(str(root), True), FashionMNIST(str(root), False), MNIST(str(root), False)]
    train, test, digits = [(s.data[:, None] / 255, s.targets) for s in sets]
    return train, test, cast(Tensor, digits[0])


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


PROBLEMS: dict[str, ModeProblem] = {
    "fashion-vit": ModeProblem(lambda: ViT(1, 7), _adamw_cosine, is_fashion=True, precision="32-true"),
    "cifar-vit": ModeProblem(lambda: ViT(3, 8), _adamw_cosine, precision="32-true"),
    "cifar-bn": ModeProblem(lambda: resnet(nn.BatchNorm2d), _adamw_onecycle),
    "fashion-gn": ModeProblem(lambda: resnet(_group_norm, 1), _sgd_cosine, is_fashion=True),
    "cifar-bn-augmented": ModeProblem(lambda: resnet(nn.BatchNorm2d), _adamw_onecycle, augmented=True),
    "fashion-bn": ModeProblem(lambda: resnet(nn.BatchNorm2d, 1), _adamw_onecycle, is_fashion=True),
    "cifar-gn": ModeProblem(lambda: resnet(_group_norm), _adamw_onecycle),
    "cifar-bn-short": ModeProblem(lambda: resnet(nn.BatchNorm2d), _adamw_onecycle, epochs=5),
    "cifar-vit-augmented": ModeProblem(lambda: ViT(3, 8), _adamw_cosine, augmented=True, precision="32-true"),
    "fashion-vit-short": ModeProblem(lambda: ViT(1, 7), _adamw_cosine, is_fashion=True, epochs=5, precision="32-true"),
}
