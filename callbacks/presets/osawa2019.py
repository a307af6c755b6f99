"""VOGN of Osawa et al. 2019, https://arxiv.org/abs/1906.02506, from the configurations released with the paper.

Source: https://github.com/team-approx-bayes/dl-with-bayes, ``distributed/classification/configs``, with the optimizer of
https://github.com/cybertronai/pytorch-sso. These facts apply to all of them:

- ``ema_decay`` weights the **new** curvature, so their 0.999 is β₂ = 0.001 here: almost no averaging.
- Momentum is a heavy-ball buffer without 1-μ, so their learning rate 1e-4 is 1e-3 here.
- γ enters the noise too. The first step has no noise, and its curvature is the first batch's, as here.
- ``mc_samples`` is per process, there and here: with ``devices=G, strategy="ddp"`` each of G processes draws its own K
  samples, K·G in total, and each example sees K of them. On one device, every example still sees K, at the same cost.
- Batches are 32 examples per process.
- The paper's table has a row for OGN on ImageNet, but its configuration was not released, so `OGNCallback` has no presets.
"""

from __future__ import annotations

from typing import Any, Final

from lightning_bayes.callbacks.presets.preset import Preset, rate_of_average, tidy

CONFIGS: Final = "https://github.com/team-approx-bayes/dl-with-bayes, distributed/classification/configs/"
EXAMPLES: Final = "https://github.com/cybertronai/pytorch-sso, examples/classification/configs/"
PRIOR_AVERAGED: Final = (
    "Their prior term in the noise and the preconditioner is averaged over updates, like the curvature."
)
BUFFER: Final = (
    "Their momentum starts from zero without bias correction, so their first 20 or so steps are up to ten times shorter. "
    f"{PRIOR_AVERAGED}"
)
BATCH_NORM: Final = (
    "Their BatchNorm parameters have neither noise nor prior. To remove the noise here, pass a regular expression as "
    "bayesian=... that excludes them; their prior remains."
)
MOMENTUM_CORRECTION: Final = (
    "After each change of the learning rate, they scale the momentum by the ratio of the rates for one epoch."
)
_EXAMPLE_SQUARES: Final = "over positions; here it is the square of each example's gradient."
BIASES: Final = f"Their curvature of a convolution's bias sums squares {_EXAMPLE_SQUARES}"
NORM_CURVATURE: Final = f"Their curvature of BatchNorm is a product or a sum of squares {_EXAMPLE_SQUARES}"


def in_our_units(
    *,
    lr: float,
    samples: int,
    eval_samples: int,
    prior_variance: float,
    damping: float = 1e-3,
    ema: float = 0.999,
    augmentation: float = 1.0,
    warmup: tuple[float, int] | None = None,
) -> dict[str, Any]:
    """Convert their numbers to arguments of a callback.

    Args:
        lr: Learning rate with a heavy-ball momentum of 0.9.
        samples: Weight samples per process.
        eval_samples: Weight samples in evaluation.
        prior_variance: 1/δ.
        damping: γ, in the noise too.
        ema: Weight of the new curvature.
        augmentation: ρ.
        warmup: The first τ, and the number of updates until τ = 1; None for τ = 1.

    Returns:
        The arguments.
    """
    tempering = {} if warmup is None else {"kl_warmup_init": warmup[0], "kl_warmup_steps": warmup[1]}
    return {
        "lr": rate_of_average(lr, momentum=0.9),
        "betas": (0.9, tidy(1 - ema)),
        "mc_samples": samples,
        "eval_samples": eval_samples,
        "prior_precision": tidy(1 / prior_variance),
        "data_augmentation_factor": augmentation,
        "damping": damping,
        "damping_in_noise": True,
        **tempering,
    }


def _vogn(name: str, config: str, arguments: dict[str, Any], setting: str, *differs: str) -> Preset:
    return Preset(f"osawa2019-{name}", "VOGNCallback", arguments, config, setting, " ".join(differs))


_MILESTONES: Final = "161 epochs, learning rate x 0.1 after epochs 80 and 120"
BATCH_256: Final = "8 processes, batch 8 x 32"
CROPS: Final = "random crops (padding 4) and mirroring"

PRESETS: Final = (
    _vogn(
        "cifar10-lenet",
        CONFIGS + "cifar10/lenet_vogn_bs128_4gpu",
        in_our_units(lr=1e-4, samples=6, eval_samples=10, prior_variance=0.01, warmup=(0.1, 11_719)),
        "LeNet-5; CIFAR-10 without augmentation; 4 processes, batch 4 x 32; 211 epochs, constant learning rate",
        BIASES,
        BUFFER,
    ),
    _vogn(
        "cifar10-alexnet",
        CONFIGS + "cifar10/alexnet_vogn_bs256_8gpu",
        in_our_units(lr=1e-4, samples=3, eval_samples=10, prior_variance=2, augmentation=10, warmup=(0.5, 1954)),
        f"AlexNet; CIFAR-10; {BATCH_256}; {_MILESTONES}",
        "Their last linear layer has a Kronecker-factored curvature; here it is diagonal. The released configuration has "
        "an augmentation factor of 10 without augmentation; the paper's table has rows with and without augmentation.",
        BIASES,
        BUFFER,
    ),
    _vogn(
        "cifar10-resnet18",
        CONFIGS + "cifar10/resnet18_vogn",
        in_our_units(lr=1e-4, samples=5, eval_samples=20, prior_variance=0.02, augmentation=10),
        f"ResNet-18 with the ImageNet stem; CIFAR-10 with {CROPS}; {BATCH_256}; {_MILESTONES}",
        NORM_CURVATURE,
        BATCH_NORM,
        MOMENTUM_CORRECTION,
        BUFFER,
    ),
    _vogn(
        "cifar10-vgg19",
        CONFIGS + "cifar10/vgg19_vogn",
        in_our_units(lr=1e-4, samples=5, eval_samples=10, prior_variance=2, augmentation=10),
        f"VGG-19 with BatchNorm; CIFAR-10 with {CROPS}; {BATCH_256}; {_MILESTONES}",
        BIASES,
        NORM_CURVATURE,
        BUFFER,
    ),
    _vogn(
        "cifar100-alexnet",
        CONFIGS + "cifar100/alexnet_vogn",
        in_our_units(lr=1e-4, samples=10, eval_samples=100, prior_variance=0.02, augmentation=10, warmup=(0.5, 1954)),
        f"AlexNet; CIFAR-100 with {CROPS}; {BATCH_256}; {_MILESTONES}",
        "Their last linear layer has a Kronecker-factored curvature; here it is diagonal.",
        BIASES,
        BUFFER,
    ),
    _vogn(
        "cifar100-resnet18",
        CONFIGS + "cifar100/resnet18_vogn",
        in_our_units(lr=1e-4, samples=5, eval_samples=20, prior_variance=0.02, augmentation=10, warmup=(0.5, 1954)),
        f"ResNet-18 with the ImageNet stem; CIFAR-100 with {CROPS}; {BATCH_256}; {_MILESTONES}",
        NORM_CURVATURE,
        BATCH_NORM,
        MOMENTUM_CORRECTION,
        BUFFER,
    ),
    _vogn(
        "imagenet-resnet18",
        CONFIGS + "imagenet/resnet18_vogn_bs4k_128gpu",
        in_our_units(
            lr=1.6e-3, samples=1, eval_samples=10, prior_variance=0.0075, damping=1e-4, ema=0.9, augmentation=5
        ),
        "ResNet-18; ImageNet; 128 processes, batch 128 x 32; 91 epochs, linear learning-rate warm-up from 1/128 of the "
        "peak over 5 epochs, x 0.1 after epochs 35, 65 and 85",
        "The released configuration has an augmentation factor of 5 without augmentation.",
        NORM_CURVATURE,
        BATCH_NORM,
        MOMENTUM_CORRECTION,
        BUFFER,
    ),
    _vogn(
        "imagenet-resnet18-4gpu",
        CONFIGS + "imagenet/resnet18_vogn_bs4k_4gpu",
        {
            **in_our_units(lr=0.016, samples=1, eval_samples=10, prior_variance=0.00075, damping=1e-4, ema=0.001),
            "lr": 0.016,  # their momentum is a running average here
        },
        "ResNet-18; ImageNet with random crops and mirroring; 4 processes, batch 4 x 32 (the file's name says 4k); "
        "90 epochs, linear learning-rate warm-up from 1/128 of the peak over 5 epochs, x 0.1 after epochs 35, 65 and 85",
        "Their momentum is a running average, as here, but each step is also multiplied by the bias correction of a "
        "curvature that has no bias: in effect a learning-rate warm-up over about 1000 updates. Their file initialises "
        "residual blocks to zero, where their curvature of BatchNorm divides by zero.",
        NORM_CURVATURE,
        PRIOR_AVERAGED,
    ),
    _vogn(
        "cifar10-lenet-batchnorm",
        EXAMPLES + "cifar10/lenet_vogn",
        {
            **in_our_units(lr=0.01, samples=10, eval_samples=0, prior_variance=1, damping=0.0, ema=0.001),
            "lr": 0.01,  # their momentum is a running average here
            "init_precision": 401.0,  # s₀ = 8e-3 and N = 50 000
        },
        "LeNet-5 with BatchNorm; CIFAR-10 without augmentation; one process, batch 128; 30 epochs, learning rate x 0.9 "
        "after each; evaluated at the mean",
        "init_precision assumes 50 000 examples; pass 0.008 N + 1 for another N. Their first noise omits the prior, which "
        "gives a precision of 400.",
        BIASES,
        NORM_CURVATURE,
        BUFFER,
    ),
    _vogn(
        "toy",
        "https://github.com/team-approx-bayes/dl-with-bayes, toy_example/main.py",
        {
            **in_our_units(
                lr=1e-3, samples=50, eval_samples=100, prior_variance=1, damping=1e-7, ema=0.01, warmup=(0.01, 1000)
            ),
            "lr": 1e-3,  # their momentum is a running average here
        },
        "MLP 2-128-1; 100 points in five blobs; batch 10; 50 epochs, constant learning rate",
        BUFFER,
    ),
)
