"""Noisy Adam of Zhang et al. 2018, https://arxiv.org/abs/1712.02390, from the paper and https://github.com/pomonam.

γ_ex enters the preconditioner only. η is the prior's variance and λ the KL weight. The paper's Algorithm 1 squares the
batch's gradient and averages gradients; the released code measures the Fisher diagonal, with labels drawn from the model,
and sums gradients in a buffer. There is one preset for each.
"""

from __future__ import annotations

from typing import Any, Final

from lightning_bayes.callbacks.presets.preset import Preset, rate_of_average, tidy

PAPER: Final = "https://arxiv.org/abs/1712.02390"
_CODE: Final = "https://github.com/pomonam/NoisyNaturalGradient, config/"
_START: Final = (
    "The paper starts from zero curvature, and the code starts with almost no noise; here the first update has no noise, "
    "and its measurement is the initial curvature."
)


def _vgg16(callback: str, source: str, lr: float, new: float, differs: str) -> Preset:
    arguments = {
        "lr": lr,
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
        "They bound the squared Fisher norm of each step by 1e-4 (by 1e-4 · 0.95ᵏ in epoch k in the paper); the callback "
        f"has no such bound, so a lower lr may be needed. {differs} {_START}",
    )


def uci(callback: str, method: str, *differs: str, **own: Any) -> Preset:
    """The regressions of section 5.1 with one of the paper's methods; `own` holds the arguments that only it has."""
    return Preset(
        "zhang2018-uci",
        callback,
        {
            "lr": 0.01,
            "betas": (0.9, 0.999),
            "mc_samples": 10,
            "eval_samples": 100,
            "prior_precision": 1.0,
            "kl_weight": 1.0,
            **own,
        },
        f"{PAPER}, section 5.1 ({method}), and {_CODE}regression",
        "MLP with one hidden layer of 50 ReLU (100 for protein and year); standardised inputs and targets, splits of 90 to "
        "10; batch 10 below 2000 examples, 500 for year, else 100; 1000 epochs, learning rate x 0.1 after 500",
        "Their noise precision has a posterior with the prior Gamma(6, 6); here it is the task's: use "
        f"BayesRegressor(noise='gamma') for the same. {' '.join(differs)}",
    )


PRESETS: Final = (
    _vgg16(
        "NoisyAdamCallback",
        f"{PAPER}, section 5.2, and {_CODE}classification/diag_vgg_plain.json",
        0.01,
        0.003,
        "lr is the paper's largest step size. The weight of the old momentum is not stated; 0.9 comes from the code, which "
        "otherwise measures the Fisher with other values.",
    ),
    _vgg16(
        "NoisyAdamFisherCallback",
        f"{_CODE}classification/diag_vgg_plain.json",
        rate_of_average(0.01, momentum=0.9),
        0.005,
        "They measure the Fisher in every tenth update, with one label drawn per example; here it is the expectation over "
        "labels, in every update. Their momentum sums preconditioned gradients without bias correction; here it averages "
        "gradients with bias correction. Their preconditioner adds only the damping, not the prior's δ̃ of 1e-4.",
    ),
    uci(
        "NoisyAdamCallback",
        "NNG-FFG",
        "Their code measures the Fisher diagonal instead of the squared gradient.",
        _START,
    ),
    uci(
        "NoisyAdamFisherCallback",
        "NNG-FFG",
        "They draw one label per example; here the Fisher is the expectation over labels.",
        _START,
    ),
)
