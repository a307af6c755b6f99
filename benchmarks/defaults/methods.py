"""The methods of a run: callbacks with default arguments, controls, and variants with another noise or interval.

The methods in `POSTHOC` add a posterior to a network that the user's optimizer has trained; ``ensemble`` trains five
networks.

- ``vogn``: the callback with default arguments
- ``vogn@0.1``: noise scale κ = 0.1
- ``vogn@0:0.1``: κ grows linearly from nearly 0 to 0.1 over the fit
- ``vogn@0.3~1``: κ = 0.3 and flatness ε = 1
- ``vogn/1``: ``curvature_interval=1``
- ``noisy_kfac/20``: ``stats_interval=20``, ten times as many updates between inversions, and the β₂ whose memory, in
  updates, is that of 0.95 at an interval of 10
- ``vogn@0.1/1``: both
- ``vogn+scale``: trained on nine tenths of the data, evaluated at the width that `PosteriorScale` fits on the last tenth
- ``vogn+mean``: the same training, evaluated at the posterior mean
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
from lightning_bayes.callbacks.posthoc import PosthocCallback
from lightning_bayes.optim import LinearSchedule

CALLBACKS: dict[str, Callable[..., VariationalCallback] | None] = {
    "user": None,  # the user's optimizer alone
    "ogn": OGNCallback,  # the same step without noise
    "vogn": VOGNCallback,
    "natural": partial(VOGNCallback, step="natural"),  # the natural direction with the length of the user's step
    "vadam": VadamCallback,
    "ivon": IVONCallback,
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
ENSEMBLE, MEMBERS = "ensemble", 5
PEER = "ivon-opt"
_METHOD = re.compile(
    r"(?P<name>[a-z_]+)(@(?P<grows>0:)?(?P<noise>[0-9.]+))?(~(?P<flatness>[0-9.]+))?(/(?P<interval>[0-9]+))?"
)
SCALED, AT_MEAN = "+scale", "+mean"
_FIRST_NOISE = 1e-4  # start of a growing κ


def width_of(method: str) -> tuple[str, str | None]:
    """Split a method into the training method and its evaluation: `SCALED`, `AT_MEAN` or None."""
    for suffix in (SCALED, AT_MEAN):
        if method.endswith(suffix):
            return method.removesuffix(suffix), suffix
    return method, None


def make_callback(method: str, seed: int, updates: int) -> VariationalCallback | PosthocCallback | None:
    """The callback of a method."""
    if method in POSTHOC:
        return POSTHOC[method](seed=seed)
    if method == ENSEMBLE:
        return None
    parts = _METHOD.fullmatch(width_of(method)[0])
    if parts is None or parts["name"] not in CALLBACKS:
        raise ValueError(
            f"{method!r} is not a method. Methods are {', '.join(CALLBACKS)}, with optional suffixes @κ, @0:κ, ~ε, /T, "
            f"{SCALED} and {AT_MEAN}; {', '.join(POSTHOC)}; and {ENSEMBLE}."
        )
    kind, settings = CALLBACKS[parts["name"]], dict[str, Any]()
    if parts["noise"]:
        noise = float(parts["noise"])
        settings["relative_noise"] = LinearSchedule(_FIRST_NOISE, noise, updates) if parts["grows"] else noise
    if parts["flatness"]:
        settings["noise_flatness"] = float(parts["flatness"])
    if parts["interval"]:
        settings |= _intervals(parts["name"], int(parts["interval"]))
    return None if kind is None else kind(seed=seed, **settings)


def _intervals(name: str, interval: int) -> dict[str, Any]:
    if name != "noisy_kfac":
        return {"curvature_interval": interval}
    betas = (0.9, 0.95 ** (interval / 10))
    return {"stats_interval": interval, "inverse_interval": 10 * interval, "betas": betas}
