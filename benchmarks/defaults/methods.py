"""The methods of a run: callbacks with default arguments, and controls.

``vogn@0.1`` sets the noise scale κ, ``vogn~1`` the flatness ε, ``vogn@0.3~1`` both. The methods in `POSTHOC` add a posterior
to a network that the user's optimizer has trained; ``ensemble`` trains three networks; ``temperature`` trains the network on
nine tenths of the data and fits one temperature on the last tenth.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.defaults.controls import FlatNoiseCallback, PermutedCallback
from lightning_bayes import (
    IVONCallback,
    LaplaceCallback,
    NoisyAdamCallback,
    NoisyKFACCallback,
    OGNCallback,
    SWAGCallback,
    VadamCallback,
    VariationalCallback,
    VOGNCallback,
)
from lightning_bayes.callbacks.posthoc.base import PosthocCallback

# The published hess_init and weight decay for 2,000 images.
_FEW: dict[str, Any] = {"num_data": 2000, "init_precision": 2000 * 0.5002, "prior_precision": 0.4}

CALLBACKS: dict[str, Callable[..., VariationalCallback] | None] = {
    "user": None,  # the user's optimizer alone
    "ogn": OGNCallback,  # the same step without noise
    "vogn": VOGNCallback,
    "vadam": VadamCallback,
    "ivon": IVONCallback,
    "ivon_lr": partial(IVONCallback, lr=1.0),
    "ivon_paper": partial(IVONCallback.from_preset, "shen2024-cifar10-resnet20", eval_samples=10, **_FEW),
    "noisy_adam": NoisyAdamCallback,
    "noisy_kfac": NoisyKFACCallback,
    "flat": FlatNoiseCallback,  # noise without a curvature
    "permuted": PermutedCallback,  # curvature permuted within each tensor
}
POSTHOC: dict[str, Callable[..., PosthocCallback]] = {
    "laplace": partial(
        LaplaceCallback, linearized=True
    ),  # last layer; linearised samples, which have a mutual information
    "laplace_all": partial(LaplaceCallback, subset="all", linearized=True),
    "swag": SWAGCallback,
}
ENSEMBLE, MEMBERS = "ensemble", 3
TEMPERATURE = "temperature"
PEER = "ivon-opt"
_METHOD = re.compile(r"(?P<name>[a-z_]+)(@(?P<noise>[0-9.]+))?(~(?P<flatness>[0-9.]+))?")


def make_callback(method: str, seed: int) -> VariationalCallback | PosthocCallback | None:
    """The callback of a method; None for the user's optimizer alone and for methods that start from it."""
    if method in POSTHOC:
        return POSTHOC[method](seed=seed)
    if method in {ENSEMBLE, TEMPERATURE}:
        return None
    parts = _METHOD.fullmatch(method)
    if parts is None or parts["name"] not in CALLBACKS:
        raise ValueError(
            f"{method!r} is not a method. Methods are {', '.join(CALLBACKS)}, with optional suffixes @κ and ~ε; "
            f"{', '.join(POSTHOC)}; {ENSEMBLE} and {TEMPERATURE}."
        )
    kind, settings = CALLBACKS[parts["name"]], dict[str, Any]()
    if parts["noise"]:
        settings["relative_noise"] = float(parts["noise"])
    if parts["flatness"]:
        settings["noise_flatness"] = float(parts["flatness"])
    return None if kind is None else kind(seed=seed, **settings)
