"""VOGN, Vadam and Bayes by Backprop of Khan et al. 2018, https://arxiv.org/abs/1806.04854.

Source: the paper's experiments and https://github.com/emtiyaz/vadam. Left out are the experiments with reinforcement
learning, which have no data set of N examples, and those on MNIST, whose prior is a grid.
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
_MATLAB: Final = (
    "The paper does not state the first curvature: here it is 0, as far as the released Matlab code's first precision of 1 "
    "is not below the prior. That code also has a momentum, which the paper's VOGN has not."
)


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


def _logistic(name: str, prior_precision: float, epochs: int, data: str) -> Preset:
    return Preset(
        f"khan2018-{name}",
        "VOGNCallback",
        {
            "lr": 5e-4,
            "betas": (0.0, tidy(1 - 5e-4)),
            "prior_precision": prior_precision,
            "init_precision": prior_precision,
        },
        _PAPER + "section 5.1 (VOGN-1)",
        f"logistic regression with a bias; {data}; batch 1; {epochs} epochs, constant learning rate",
        _MATLAB,
    )


def _uci(name: str, callback: str, batch: int, samples: int, init_precision: float, differs: str = "") -> Preset:
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
        "epochs; Gaussian noise of its own precision",
        f"Prior and noise precision were found by Bayesian optimisation for each split; here the prior's is 1. {differs}",
    )


_UCI_START: Final = (
    "With another prior_precision pass the same number as init_precision, which starts from no curvature."
)
_SMALL, _LARGE = "uci-small", "uci-large"  # yacht, energy, boston, concrete; wine, kin8nm, naval, power

PRESETS: Final = (
    Preset(
        "khan2018-toy",
        "VOGNCallback",
        {
            "lr": PowerDecay(0.1, power=0.55),
            "betas": (0.0, 0.9),
            "prior_precision": 0.01,
            "init_precision": 1.0,
        },
        _PAPER + "section 5.1 and figure 2, left (VOGN-1)",
        "logistic regression in 2 dimensions; 60 examples; batch 1; 500 000 updates",
        f"The weight of the new curvature decays there like the learning rate, here it stays 0.1. {_MATLAB}",
    ),
    _logistic("usps", 25.0, 200, _USPS),
    _logistic("breast-cancer", 1.0, 2000, _BREAST_CANCER),
    Preset(
        "khan2018-australian",
        "VOGNCallback",
        {"lr": 1e-3, "betas": (0.0, 0.999), "prior_precision": 1.0, "init_precision": 1.0},
        _PAPER + "appendix J.2",
        _AUSTRALIAN,
        "The appendix compares mc_samples=1 with mc_samples=16.",
    ),
    _uci(_SMALL, "VadamCallback", 32, 10, 1.0, _UCI_START),
    _uci(_LARGE, "VadamCallback", 128, 5, 1.0, _UCI_START),
    _uci(_SMALL, "BBBCallback", 32, 20, 10.0),
    _uci(_LARGE, "BBBCallback", 128, 10, 10.0),
    Preset(
        "khan2018-australian",
        "VadamCallback",
        {"lr": 1e-3, "betas": (0.9, 0.999), "prior_precision": 1.0, "init_precision": 1.0},
        _PAPER + "appendix J.2",
        _AUSTRALIAN,
        "The appendix compares mc_samples=1 with mc_samples=16.",
    ),
    *(
        Preset(
            f"khan2018-{name}",
            "VadamCallback",
            {
                "lr": 0.01,
                "betas": (0.9, 0.99),
                "prior_precision": prior_precision,
                "init_precision": prior_precision,
            },
            _PAPER + "section 5.1",
            f"logistic regression with a bias; {data}; batch 1, 8, 16, 32, 64 or 128; 10 000 epochs",
            "The released Matlab code takes sums over the data and the bias-corrected curvature for its noise, so its steps "
            "and its damping are others.",
        )
        for name, prior_precision, data in (("usps", 25.0, _USPS), ("breast-cancer", 1.0, _BREAST_CANCER))
    ),
)
