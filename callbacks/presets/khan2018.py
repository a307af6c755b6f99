"""VOGN, Vadam and Bayes by Backprop of Khan et al. 2018, https://arxiv.org/abs/1806.04854.

Source: the paper's experiments and https://github.com/emtiyaz/vadam. There are no presets for the reinforcement-learning
experiments, which have no data set of N examples, and for those on MNIST, which search a grid of priors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, final

from lightning_bayes.callbacks.presets.preset import Preset, tidy
from lightning_bayes.optim import Schedule

_PAPER: Final = "https://arxiv.org/abs/1806.04854, "
_USPS: Final = "USPS, 3 against 5, 257 inputs with the constant one"
_BREAST_CANCER: Final = "LIBSVM's breast-cancer_scale, 341 examples for training"
_AUSTRALIAN: Final = (
    "MLP 14-64-1 with ReLU; LIBSVM's australian, 345 examples for training, inputs as they are; batch 1, 4, 16 or 128; "
    "about 5000 updates"
)
_SAMPLES: Final = "The appendix compares mc_samples=1 with mc_samples=16."
_MOMENTUM: Final = "The paper does not state the momentum; 0.9 comes from the released Matlab code."
_BIAS: Final = "In the code, the prior precision of the bias is 1e-5, and batches are drawn with replacement."
_DECAY: Final = (
    "In the paper the weight of the new curvature decays like the learning rate (eq. 104); here it is constant at"
)
_FROM_ONE: Final = "In the learning-rate decay, the code counts updates from 1; here they are counted from 0."
_POWER: Final = 0.55  # of eq. 104


@final
@dataclass(frozen=True)
class PowerDecay(Schedule):
    """``start / (1 + t^power)`` after t updates.

    Example:
        >>> PowerDecay(0.1, power=0.55)(1)
        0.05
    """

    start: float
    power: float

    def __call__(self, step: int) -> float:
        """Return the value; see `Schedule`."""
        return self.start / (1 + math.pow(step, self.power))


def _vogn_1(name: str, prior_precision: float, epochs: int, data: str, *differs: str) -> Preset:
    return Preset(
        f"khan2018-{name}",
        "VOGNCallback",
        {
            "lr": 5e-4,
            "betas": (0.9, tidy(1 - 5e-4)),
            "prior_precision": prior_precision,
            "init_precision": prior_precision,
        },
        _PAPER + "section 6.1 and appendix I.2 (VOGN-1), and matlab",
        f"logistic regression with a bias; {data}; batch 1; {epochs} epochs, constant learning rate",
        " ".join((_MOMENTUM, _BIAS, *differs)),
    )


def _vadam(name: str, prior_precision: float, batch: str, data: str) -> Preset:
    return Preset(
        f"khan2018-{name}",
        "VadamCallback",
        {
            "lr": PowerDecay(0.01, _POWER),
            "betas": (0.9, 0.99),
            "prior_precision": prior_precision,
            "init_precision": prior_precision,
        },
        _PAPER + "appendix I.2, and matlab",
        f"logistic regression with a bias; {data}; batch {batch}; 10 000 epochs, learning rate as here",
        f"{_DECAY} 0.01. {_FROM_ONE} {_MOMENTUM} The code works with sums over the data, so its steps are √N times longer "
        "and its damping is √N times smaller. It starts from precision 1 and divides its curvature by 1 - β₂ᵗ as if it "
        "had started from zero, in the noise too. Here the curvature starts from zero, so the precision starts from the "
        f"prior's, and the noise uses the curvature itself, as in the paper. {_BIAS}",
    )


def _uci(name: str, callback: str, batch: int, samples: int, init_precision: float, *differs: str) -> Preset:
    return Preset(
        f"khan2018-{name}",
        callback,
        {
            "lr": 0.01,
            "betas": (0.9, 0.99),
            "mc_samples": samples,
            "eval_samples": 100,
            "prior_precision": 1.0,
            "init_precision": init_precision,
        },
        _PAPER + "appendix J.1, and uci_code",
        f"MLP with one hidden layer of 50 ReLU; standardised inputs and targets, 20 splits of 90 to 10; batch {batch}; 40 "
        "epochs; Gaussian noise with a tuned precision",
        " ".join((_TUNED, _SWAPPED, _JOINT, *differs)),
    )


_TUNED: Final = (
    "Khan et al. tune the prior precision and the noise precision of each split by Bayesian optimisation; here the prior "
    "precision is 1 and the noise precision is the task's."
)
_SWAPPED: Final = "The appendix prints γ₁ = 0.99 and γ₂ = 0.9; the code swaps them, as here."
_JOINT: Final = (
    "Their log-likelihood is the joint one of all test points under each sample, divided by their number; the metrics here "
    "are per point."
)
_UCI_START: Final = (
    "The appendix prints an initial precision of 10. The authors call this a mistake: it was the prior precision. If you "
    "change prior_precision, pass the same number as init_precision."
)
_BBVI: Final = "Their standard deviation is a softplus of its parameter; here Adam moves its logarithm."
_SMALL, _LARGE = "uci-small", "uci-large"  # yacht, energy, boston, concrete; wine, kin8nm, naval, power

PRESETS: Final = (
    Preset(
        "khan2018-toy",
        "VOGNCallback",
        {
            "lr": PowerDecay(0.1, _POWER),
            "betas": (0.9, 0.9),
            "prior_precision": 0.01,
            "init_precision": 1.01,
        },
        _PAPER + "section 6.1 and appendix I.1 (VOGN-1), and matlab",
        "logistic regression in 2 dimensions; 60 examples; batch 1; 500 000 updates",
        f"{_DECAY} 0.1. {_FROM_ONE} {_MOMENTUM} The code draws its batches with replacement.",
    ),
    _vogn_1(
        "usps",
        25.0,
        200,
        _USPS,
        "The code starts from precision 1, below the prior's; here training starts from the prior's precision.",
    ),
    _vogn_1("breast-cancer", 1.0, 2000, _BREAST_CANCER),
    Preset(
        "khan2018-australian",
        "VOGNCallback",
        {"lr": 1e-3, "betas": (0.0, 0.999), "prior_precision": 1.0, "init_precision": 1.0},
        _PAPER + "appendix J.2, and vogn_code",
        _AUSTRALIAN,
        f"{_SAMPLES} It prints γ₁ = 0.9 for VOGN, but the code uses no momentum. It does not print the weight of the new "
        "curvature, which is 0.001 in the code.",
    ),
    _uci(_SMALL, "VadamCallback", 32, 10, 1.0, _UCI_START),
    _uci(_LARGE, "VadamCallback", 128, 5, 1.0, _UCI_START),
    _uci(_SMALL, "BBBCallback", 32, 20, 10.0, _BBVI),
    _uci(_LARGE, "BBBCallback", 128, 10, 10.0, _BBVI),
    Preset(
        "khan2018-australian",
        "VadamCallback",
        {"lr": 1e-3, "betas": (0.9, 0.999), "prior_precision": 1.0, "init_precision": 1.0},
        _PAPER + "appendix J.2, and vogn_code",
        _AUSTRALIAN,
        _SAMPLES,
    ),
    _vadam("usps", 25.0, "64", _USPS),
    _vadam("breast-cancer", 1.0, "1, 8, 16, 32 or 64", _BREAST_CANCER),
)
