"""Reading posteriors from optimizers and checkpoints.

This package translates the keys of parameter groups and optimizer states into the numbers that `posteriors` works with.
"""

from lightning_bayes.optim.readout.checkpoint import (
    CALLBACK_KEY,
    POSTERIOR_KEY,
    SCALE_KEY,
    callback_state,
    load_posterior,
    posterior_from_checkpoint,
    read_checkpoint,
    require_checkpoint,
    stored_posterior,
)
from lightning_bayes.optim.readout.layer import layer_damping, layer_precision, layer_scale, layer_shape
from lightning_bayes.optim.readout.noise_terms import shape_of
from lightning_bayes.optim.readout.parameter import temperature_of
from lightning_bayes.optim.readout.state import Entry, WeightPosterior, posterior_of, state_precision

__all__ = [
    "CALLBACK_KEY",
    "POSTERIOR_KEY",
    "SCALE_KEY",
    "Entry",
    "WeightPosterior",
    "callback_state",
    "layer_damping",
    "layer_precision",
    "layer_scale",
    "layer_shape",
    "load_posterior",
    "posterior_from_checkpoint",
    "posterior_of",
    "read_checkpoint",
    "require_checkpoint",
    "shape_of",
    "state_precision",
    "stored_posterior",
    "temperature_of",
]
