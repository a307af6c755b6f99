"""Noisy K-FAC of Zhang et al. 2018, https://arxiv.org/abs/1712.02390, from https://github.com/gd-zhang/noisy-K-FAC.

The Fisher, with one drawn label per example, is measured every 10th and inverted every 200th update. The prior's gradient is
evaluated at the sample, as in Algorithm 2. γ_ex enters the preconditioner only; η is the prior's variance, λ the KL weight.
"""

from __future__ import annotations

from typing import Any, Final

from lightning_bayes.callbacks.presets.preset import Preset, rate_of_average
from lightning_bayes.callbacks.presets.zhang2018 import PAPER, uci
from lightning_bayes.optim import ExponentialSchedule

_ALGORITHM: Final[dict[str, Any]] = {"fisher": "sampled", "prior_at": "sample"}
_UPDATES: Final = 390  # per epoch, with 50 000 examples in batches of 128
_DIFFERENCES: Final = (
    "Their momentum sums preconditioned gradients, each clipped separately, without bias correction; here it averages "
    "gradients with bias correction, and the whole step is clipped, which is stricter. Their factors start from the "
    "identity, and their first 200 updates have almost no noise; here the first measurement sets the factors, inverses are "
    "renewed at the measurements 1, 2, 4, 8 and so on, and layers take turns. The code preconditions with the damping "
    "alone; here the prior's δ̃ is added to it, as in the paper. The code measures the Fisher in a separate pass, under "
    "another weight sample and with BatchNorm in evaluation mode; here it is measured in the gradient's pass. The code "
    "averages logits over weight samples; here probabilities are averaged."
)


def _vgg16(suffix: str, clip: float, kl_weight: float, variance: float, setting: str, differs: str = "") -> Preset:
    arguments = {
        "lr": rate_of_average(0.01, momentum=0.9),
        "betas": (0.9, 0.99),
        "eval_samples": 10,
        "prior_precision": 1 / variance,
        "kl_weight": kl_weight,
        "damping": 1e-3,
        "kl_clip": ExponentialSchedule(clip, 0.95, every=_UPDATES),
        "stats_interval": 10,
        "inverse_interval": 200,
        **_ALGORITHM,
    }
    return Preset(
        f"zhang2018-cifar10-vgg16{suffix}",
        "NoisyKFACCallback",
        arguments,
        f"{PAPER}, section 5.2, and https://github.com/gd-zhang/noisy-K-FAC, configs/",
        f"VGG-16 with half the filters; CIFAR-10; batch 128; 150 epochs; {setting}",
        f"{differs}{_DIFFERENCES} kl_clip falls by 5 % every 390 updates, an epoch of 50 000 examples.",
    )


_BATCH_NORM: Final = "Their BatchNorm parameters are not trained; here they are, with a mean-field posterior. "

PRESETS: Final = (
    _vgg16("", 1e-3, 0.5, 0.1, "without augmentation and BatchNorm"),
    _vgg16("-augmented", 1e-3, 0.1, 0.1, "with random crops and mirroring, without BatchNorm"),
    _vgg16("-batchnorm", 1e-2, 0.5, 1.0, "with BatchNorm, without augmentation", _BATCH_NORM),
    _vgg16("-augmented-batchnorm", 1e-2, 0.1, 1.0, "with random crops, mirroring and BatchNorm", _BATCH_NORM),
    uci(
        "NoisyKFACCallback",
        "NNG-MVG",
        "Their factors start near the identity; here the first update has no noise, and its measurement sets the factors. "
        "The momentum of 0.9 comes from the code; Algorithm 2 has none.",
        damping=0.0,
        stats_interval=1,
        inverse_interval=1,
        **_ALGORITHM,
    ),
)
