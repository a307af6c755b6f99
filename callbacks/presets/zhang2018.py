"""Noisy Adam of Zhang et al. 2018, https://arxiv.org/abs/1712.02390, from the paper and https://github.com/pomonam.

γ_ex is in the preconditioner alone. η is the prior's variance and λ the KL weight. The released code takes the Fisher's
diagonal, with labels that the model draws, where the paper's Algorithm 1 squares the batch's gradient: one preset each.
"""

from __future__ import annotations

from typing import Any, Final

from lightning_bayes.callbacks.presets.preset import Preset, rate_of_average, tidy

_PAPER: Final = "https://arxiv.org/abs/1712.02390"
_CODE: Final = "https://github.com/pomonam/NoisyNaturalGradient, config/"
_START: Final = (
    "The paper starts from no curvature and the code from hardly any noise; here the first batch has no noise and sets the "
    "first curvature."
)


def _vgg16(callback: str, source: str, new: float, differs: str) -> Preset:
    arguments = {
        "lr": rate_of_average(0.01, momentum=0.9),
        "betas": (0.9, tidy(1 - new)),
        "eval_samples": 10,
        "prior_precision": 10.0,  # η = 0.1
        "kl_weight": 0.5,  # λ
        "damping": 1e-3,  # γ_ex
    }
    return Preset(
        "zhang2018-cifar10-vgg16",
        callback,
        arguments,
        source,
        "VGG-16 with half the filters, without BatchNorm; CIFAR-10 without augmentation; batch 128; 150 epochs",
        f"Their KL clipping at 1e-4 bounds each step, which the callback does not: a lower lr may be needed. {differs} "
        f"{_START}",
    )


def _uci(callback: str, differs: str) -> Preset:
    arguments: dict[str, Any] = {
        "lr": 0.01,
        "betas": (0.9, 0.999),
        "mc_samples": 10,
        "eval_samples": 100,
        "prior_precision": 1.0,
        "kl_weight": 1.0,
    }
    return Preset(
        "zhang2018-uci",
        callback,
        arguments,
        f"{_PAPER}, section 5.1 (NNG-FFG), and {_CODE}regression",
        "MLP with one hidden layer of 50 ReLU (100 for protein and year); standardised inputs and targets, splits of 90 to "
        "10; batch 10 below 2000 examples, 500 for year, else 100; 1000 epochs, learning rate x 0.1 after 500",
        f"Their noise precision has a posterior of its own, with the prior Gamma(6, 6). {differs} {_START}",
    )


PRESETS: Final = (
    _vgg16(
        "NoisyAdamCallback",
        f"{_PAPER}, section 5.2, and {_CODE}classification/diag_vgg_plain.json",
        0.003,
        "The weight of the new curvature is the paper's 0.003; the code, which has 0.005, does not run this algorithm.",
    ),
    _vgg16(
        "NoisyAdamFisherCallback",
        f"{_CODE}classification/diag_vgg_plain.json",
        0.005,
        "They measure the Fisher every tenth update, with one label drawn for each example; here it is its expectation, at "
        "every update.",
    ),
    _uci("NoisyAdamCallback", "Their code takes the Fisher's diagonal."),
    _uci("NoisyAdamFisherCallback", "They draw one label for each example; here it is the expectation."),
)
