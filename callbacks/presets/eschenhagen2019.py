"""VOGN for continual learning, first task, Eschenhagen 2019.

Source: https://team-approx-bayes.github.io/assets/rgroups/thesis_runa_eschenhagen.pdf, section 4. Its step sizes weight the
new value: α = β = 1e-3.
"""

from __future__ import annotations

from typing import Any, Final

from lightning_bayes.callbacks.presets.preset import Preset

_SOURCE: Final = "https://team-approx-bayes.github.io/assets/rgroups/thesis_runa_eschenhagen.pdf, section 4"
_FIRST_TASK: Final = (
    "The preset covers the first task. For every later task pass the previous posterior as prior=. The thesis also draws "
    "new initial means and restarts from the initial precision (split CIFAR: 4e4); here the initial precision minus "
    "prior_precision is added to the precision of each weight's prior. No damping is stated; here there is none."
)
_COMMON: Final[dict[str, Any]] = {"lr": 1e-3, "betas": (0.0, 0.999), "mc_samples": 10, "eval_samples": 100}

PRESETS: Final = (
    Preset(
        "eschenhagen2019-permuted-mnist",
        "VOGNCallback",
        {**_COMMON, "prior_precision": 1.0, "init_precision": 1e6},
        _SOURCE,
        "MLP 784-100-100-10 with ReLU; permuted MNIST, first of 10 tasks; batch 256; 100 epochs",
        f"{_FIRST_TASK} No momentum is stated; here there is none.",
    ),
    Preset(
        "eschenhagen2019-split-mnist",
        "VOGNCallback",
        {**_COMMON, "prior_precision": 1.0, "init_precision": 1e6},
        _SOURCE,
        "MLP with one hidden layer of 200 and one head per task; split MNIST, first task; batch 256; 100 epochs",
        f"{_FIRST_TASK} No momentum is stated; here there is none.",
    ),
    Preset(
        "eschenhagen2019-split-cifar",
        "VOGNCallback",
        {**_COMMON, "betas": (0.9, 0.9999), "prior_precision": 120.0, "init_precision": 4e3},
        _SOURCE,
        "four convolutions and two linear layers without dropout; split CIFAR-10/100, first task; batch 256; 60 epochs",
        f"{_FIRST_TASK} Whether the momentum of 0.9 is a running average or a heavy-ball buffer is not stated; here it is "
        "a running average.",
    ),
)
