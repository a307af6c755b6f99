"""Vprop and CVI of Khan et al. 2017, https://arxiv.org/abs/1712.01038, which states no learning rates."""

from __future__ import annotations

from typing import Any, Final

from lightning_bayes.callbacks.presets.preset import Preset

_SOURCE: Final = "https://arxiv.org/abs/1712.01038, section 4"
_NO_RATE: Final = (
    "The learning rate α, which is also the weight of the new curvature, is not stated: pass lr=α and betas=(0.0, 1-α). "
    "Without them the step is this package's default."
)
_START: Final = (
    "The initial curvature is not stated either; here the first update has no noise, and its measurement is the initial "
    "curvature."
)
_POSITIVE: Final = (
    "The paper does not state how it keeps the precision positive; here the step of the precision is shortened."
)
_PROBLEMS: Final = {  # prior precision, and what is learned
    "australian": (1e-5, "logistic regression with a bias; LIBSVM's australian_scale, 345 examples for training"),
    "a1a": (2.8072, "logistic regression with a bias; LIBSVM's a1a, 1605 examples for training"),
    "mlp": (1.0, "MLP with two hidden layers of 10"),
}


def _preset(problem: str, suffix: str, callback: str, arguments: dict[str, Any], *differs: str) -> Preset:
    prior_precision, data = _PROBLEMS[problem]
    return Preset(
        f"khan2017-{problem}{suffix}",
        callback,
        {**arguments, "prior_precision": prior_precision},
        _SOURCE,
        f"{data}; all examples in one batch",
        " ".join((_NO_RATE, _START, *differs)),
    )


PRESETS: Final = (
    *(_preset(problem, "-1", "VpropCallback", {"scaling": "sum", "mc_samples": 1}) for problem in _PROBLEMS),
    *(_preset(problem, "-2", "VpropCallback", {"scaling": "sum", "mc_samples": 2}) for problem in _PROBLEMS),
    *(_preset(problem, "", "Vprop0Callback", {"scaling": "sum"}) for problem in _PROBLEMS),
    *(_preset(problem, "", "CVICallback", {"mc_samples": 10}, _POSITIVE) for problem in _PROBLEMS),
)
