"""Read posteriors out of optimizers and checkpoints.

An optimizer keeps its numbers in parameter groups and state, under names that only `optim` knows. `posteriors` takes
numbers; this package looks them up.
"""

from lightning_bayes.optim.readout.checkpoint import (
    CALLBACK_KEY,
    callback_state,
    load_posterior,
    posterior_from_checkpoint,
    read_checkpoint,
    require_checkpoint,
)
from lightning_bayes.optim.readout.layer import layer_floored, layer_noise_damping, layer_precision
from lightning_bayes.optim.readout.state import Entry, WeightPosterior, posterior_of, state_precision

__all__ = [
    "CALLBACK_KEY",
    "Entry",
    "WeightPosterior",
    "callback_state",
    "layer_floored",
    "layer_noise_damping",
    "layer_precision",
    "load_posterior",
    "posterior_from_checkpoint",
    "posterior_of",
    "read_checkpoint",
    "require_checkpoint",
    "state_precision",
]
