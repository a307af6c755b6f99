"""The methods that a run may use: callbacks without arguments, controls, and both with another noise or interval.

`POSTHOC` makes a posterior of what the user's optimizer has trained; ``ensemble`` trains five networks.

- ``vogn``: the callback as it is
- ``vogn@0.1``: with the noise scale κ = 0.1
- ``vogn@0:0.1``: with a κ that grows linearly from nearly 0 to 0.1 over the fit
- ``vogn@0.3~1``: with κ = 0.3 and the flatness ε = 1
- ``vogn/1``: with ``curvature_interval=1``
- ``noisy_kfac/20``: with ``stats_interval=20``, ten times as many updates between inversions, and a β₂ of the same memory
  in updates as 0.95 at an interval of 10
- ``vogn@0.1/1``: with both
- ``vogn+scale``: trained on nine tenths, and evaluated at the width that `PosteriorScale` has chosen on the last tenth
- ``vogn+mean``: the same training, evaluated at the posterior's mean
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
    "ogn": OGNCallback,  # the step without the noise
    "vogn": VOGNCallback,
    "natural": partial(VOGNCallback, step="natural"),  # as long as the user's step
    "vadam": VadamCallback,
    "ivon": IVONCallback,
    "noisy_adam": NoisyAdamCallback,
    "noisy_kfac": NoisyKFACCallback,
    "flat": FlatNoiseCallback,  # no curvature
    "permuted": PermutedCallback,  # the curvature at other weights of the tensor
}
POSTHOC: dict[str, Callable[..., PosthocCallback]] = {
    "laplace": partial(LaplaceCallback, linearized=True),  # the last layer; samples, which have a mutual information
    "laplace_all": partial(LaplaceCallback, subset="all", linearized=True),
    "swag": SWAGCallback,
}
ENSEMBLE, MEMBERS = "ensemble", 5
PEER = "ivon-opt"
_METHOD = re.compile(
    r"(?P<name>[a-z_]+)(@(?P<grows>0:)?(?P<noise>[0-9.]+))?(~(?P<flatness>[0-9.]+))?(/(?P<interval>[0-9]+))?"
)
SCALED, AT_MEAN = "+scale", "+mean"
_LEAST_NOISE = 1e-4  # where a growing κ begins


def width_of(method: str) -> tuple[str, str | None]:
    """A method that trains, and at what width it is evaluated: `SCALED`, `AT_MEAN` or None."""
    for suffix in (SCALED, AT_MEAN):
        if method.endswith(suffix):
            return method.removesuffix(suffix), suffix
    return method, None


def make_callback(method: str, seed: int, updates: int) -> VariationalCallback | PosthocCallback | None:
    """The callback of a method.

    Args:
        method: A key of `CALLBACKS`, with a noise scale, a flatness and an interval where wanted, see above.
        seed: Of the noise.
        updates: Of the whole fit.

    Returns:
        The callback; None for the user's optimizer alone, and for an ensemble of such runs.

    Raises:
        ValueError: If no method is spelled like that.
    """
    if method in POSTHOC:
        return POSTHOC[method](seed=seed)
    if method == ENSEMBLE:
        return None
    parts = _METHOD.fullmatch(width_of(method)[0])
    if parts is None or parts["name"] not in CALLBACKS:
        raise ValueError(
            f"{method!r} is none of {', '.join(CALLBACKS)}, with @κ, @0:κ, ~ε and /T behind it where wanted, "
            f"{', '.join(POSTHOC)} and {ENSEMBLE}, or ends in {SCALED} or {AT_MEAN}."
        )
    kind, settings = CALLBACKS[parts["name"]], dict[str, Any]()
    if parts["noise"]:
        noise = float(parts["noise"])
        settings["relative_noise"] = LinearSchedule(_LEAST_NOISE, noise, updates) if parts["grows"] else noise
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
