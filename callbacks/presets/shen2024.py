"""IVON of Shen et al. 2024, https://arxiv.org/abs/2402.17641, from https://github.com/team-approx-bayes/ivon-experiments.

Their weight decay is δ̃ = δ/N, their ``ess`` is N, their ``hess_init`` is s₀, and the learning rate is multiplied by
s₀ + δ̃. Prior and initial precision follow from the data sets' N.
"""

from __future__ import annotations

from typing import Final

from lightning_bayes.callbacks.presets.preset import Preset, tidy

_NO_DIFFERENCE: Final = (
    "No difference in the update is known. prior_precision, init_precision and num_data assume this data set; for another N "
    "pass N times the weight decay, N times the sum of hess_init and the weight decay, and N."
)


def _ivon(
    name: str, lr: float, beta2: float, num_data: int, hess_init: float, weight_decay: float, setting: str
) -> Preset:
    arguments = {
        "lr": lr,
        "betas": (0.9, beta2),
        "eval_samples": 64,
        "prior_precision": tidy(num_data * weight_decay),
        "init_precision": tidy(num_data * (hess_init + weight_decay)),
        "num_data": num_data,
        "rescale_lr": True,
    }
    return Preset(
        f"shen2024-{name}",
        "IVONCallback",
        arguments,
        "https://arxiv.org/abs/2402.17641, with https://github.com/team-approx-bayes/ivon-experiments",
        setting,
        _NO_DIFFERENCE,
    )


PRESETS: Final = (
    _ivon(
        "cifar10-resnet20",
        0.2,
        0.99999,
        50_000,
        0.5,
        2e-4,
        "ResNet-20 with filter response normalisation; CIFAR-10 (or CIFAR-100) with random crops and mirroring; batch 50; "
        "200 epochs, warm-up of the learning rate over 5 epochs, then half a cosine",
    ),
    _ivon(
        "tinyimagenet",
        0.2,
        0.99999,
        200_000,
        0.5,
        2e-4,
        "TinyImageNet with augmentation; batch 50; 200 epochs",
    ),
    _ivon(
        "imagenet-resnet50",
        2.5,
        0.999995,
        1_281_167,
        0.05,
        5e-5,
        "ResNet-50; ImageNet with augmentation; batch 1024",
    ),
)
