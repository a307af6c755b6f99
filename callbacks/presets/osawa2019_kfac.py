"""K-FAC and Noisy K-FAC of Osawa et al. 2019, with the facts and sources of `osawa2019`.

The curvature is the Fisher, with one drawn label per example, measured and inverted in every update. The K-FAC settings have
an L2 penalty; N times the penalty is the prior precision.
"""

from __future__ import annotations

from typing import Any, Final

from lightning_bayes.callbacks.presets.osawa2019 import (
    BATCH_256,
    BATCH_NORM,
    BUFFER,
    CONFIGS,
    CROPS,
    EXAMPLES,
    MOMENTUM_CORRECTION,
    NORM_CURVATURE,
    in_our_units,
)
from lightning_bayes.callbacks.presets.preset import Preset, tidy

_EVERY_UPDATE: Final[dict[str, Any]] = {"stats_interval": 1, "inverse_interval": 1, "fisher": "sampled"}
_WARM_UP: Final = "linear learning-rate warm-up from 1/128 of the peak over 5 epochs"
_SAMPLING: Final = "Their samples use the wrong triangle of a factor's root, so their noise has a different covariance."
_NO_PENALTY: Final = "They do not penalise BatchNorm; here its parameters have the same prior as all others."


def _noisy(name: str, config: str, arguments: dict[str, Any], setting: str, *differs: str) -> Preset:
    merged = {**arguments, **_EVERY_UPDATE}
    return Preset(f"osawa2019-{name}", "NoisyKFACCallback", merged, config, setting, " ".join((*differs, _SAMPLING)))


def _deterministic(
    name: str,
    config: str,
    lr: float,
    penalty: float,
    num_data: int,
    damping: float,
    ema: float,
    setting: str,
    *differs: str,
) -> Preset:
    units = in_our_units(lr=lr, samples=1, eval_samples=0, prior_variance=1.0, damping=damping, ema=ema)
    shared = {key: units[key] for key in ("lr", "betas", "damping")}
    arguments = {**shared, **_EVERY_UPDATE, "prior_precision": tidy(penalty * num_data)}
    return Preset(
        f"osawa2019-{name}", "KFACCallback", arguments, CONFIGS + config, setting, " ".join((*differs, BUFFER))
    )


PRESETS: Final = (
    _noisy(
        "cifar10-alexnet",
        CONFIGS + "cifar10/alexnet_noisykfac_bs256_8gpu",
        in_our_units(lr=1e-3, samples=3, eval_samples=10, prior_variance=2, warmup=(0.01, 15_821)),
        f"AlexNet; CIFAR-10 with {CROPS}; {BATCH_256}; 81 epochs, learning rate x 0.1 after epochs 30 and 50",
        BUFFER,
    ),
    _noisy(
        "imagenet-resnet18",
        CONFIGS + "imagenet/resnet18_noisykfac_bs4k_128gpu",
        in_our_units(
            lr=1.6e-3, samples=1, eval_samples=10, prior_variance=0.0075, damping=1e-4, ema=0.9, augmentation=5
        ),
        "ResNet-18; ImageNet with random crops and mirroring; 128 processes, batch 128 x 32; 61 epochs, "
        f"{_WARM_UP}, x 0.1 after epochs 20, 35 and 50",
        NORM_CURVATURE,
        BATCH_NORM,
        MOMENTUM_CORRECTION,
        BUFFER,
    ),
    _noisy(
        "cifar10-lenet-batchnorm",
        EXAMPLES + "cifar10/lenet_noisykfac",
        {
            **in_our_units(lr=4e-3, samples=4, eval_samples=10, prior_variance=1, damping=1e-4, ema=0.333),
            "kl_weight": 0.2,
        },
        "LeNet-5 with BatchNorm; CIFAR-10, not normalised; one process, batch 64; 15 epochs, learning rate x 0.9 after "
        "each; AdamW's weight decay of 0.1",
        "Their momentum averages preconditioned gradients, here gradients. The number of samples in evaluation is unknown.",
        NORM_CURVATURE,
        BUFFER,
    ),
    _deterministic(
        "cifar10-lenet",
        "cifar10/lenet_kfac_bs128_4gpu",
        1e-3,
        1e-3,
        50_000,
        1e-3,
        0.999,
        f"LeNet-5; CIFAR-10 with {CROPS}; 4 processes, batch 4 x 32; 50 epochs, learning rate x 0.9 after each",
    ),
    _deterministic(
        "cifar10-alexnet",
        "cifar10/alexnet_kfac_bs256_8gpu",
        1e-2,
        1e-3,
        50_000,
        1e-3,
        0.999,
        f"AlexNet; CIFAR-10 with {CROPS}; {BATCH_256}; 61 epochs, learning rate x 0.1 after epochs 30 and 50",
    ),
    _deterministic(
        "imagenet-resnet18",
        "imagenet/resnet18_kfac_bs4k_128gpu",
        1.6e-3,
        1e-4,
        1_281_167,
        1e-4,
        1.0,
        "ResNet-18; ImageNet with random crops and mirroring; 128 processes, batch 128 x 32; 61 epochs, "
        f"{_WARM_UP}, x 0.1 after epochs 20, 35 and 50",
        _NO_PENALTY,
        NORM_CURVATURE,
        MOMENTUM_CORRECTION,
    ),
)
