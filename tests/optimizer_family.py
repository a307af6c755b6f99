"""Every concrete optimizer of the package; new ones are found by themselves."""

from __future__ import annotations

import inspect

import lightning_bayes.optim  # noqa: F401  its import defines the subclasses
from lightning_bayes.optim import NoisyOptimizer


def concrete(cls):
    for child in cls.__subclasses__():
        if not inspect.isabstract(child) and "natural_update" in vars(child):
            yield child
        yield from concrete(child)


OPTIMIZERS = sorted(set(concrete(NoisyOptimizer)), key=lambda cls: cls.__name__)
