"""Reading a posterior from a Lightning checkpoint, without Lightning and without running code from the file."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.errors import PosteriorError
from lightning_bayes.posteriors.mean_field import MeanField
from lightning_bayes.posteriors.precision import state_precision

# Key of the callbacks' state in a checkpoint: one for the whole family, so that a run can change its arguments.
CALLBACK_KEY = "lightning_bayes"


def load_posterior(path: str | os.PathLike[str], map_location: str | torch.device = "cpu") -> MeanField:
    """Load the posterior that training with one of the callbacks left in a checkpoint.

    Args:
        path: A Lightning checkpoint (``last.ckpt``).
        map_location: Device of the tensors.

    Returns:
        The posterior by parameter name, as the LightningModule names them; see `MeanField.select` for a submodule.

    Raises:
        PosteriorError: If the file is no Lightning checkpoint or holds no posterior.
    """
    with open(path, "rb") as file:
        try:
            checkpoint = torch.load(file, map_location=map_location, weights_only=True)
        except Exception as error:  # a foreign or damaged file makes the parser fail in any way
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise PosteriorError(f"{path} cannot be read as a checkpoint ({reason}). Is the file complete?") from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise PosteriorError(f"{path} is no Lightning checkpoint: it has no 'state_dict'.")
    return posterior_from_checkpoint(checkpoint, str(path))


def posterior_from_checkpoint(checkpoint: dict[str, Any], source: str = "The checkpoint") -> MeanField:
    """Build the posterior from a loaded checkpoint; arguments, result and errors as in `load_posterior`.

    Args:
        checkpoint: Contents of a Lightning checkpoint.
        source: What error messages call it.

    Returns:
        The posterior.

    Raises:
        PosteriorError: If there is none.
    """
    names = checkpoint.get("callbacks", {}).get(CALLBACK_KEY, {}).get("param_names")
    states = checkpoint.get("optimizer_states")
    if not names or not states:
        raise PosteriorError(
            f"{source} holds no posterior: it was written without VOGNCallback, or with save_weights_only=True. "
            "Train with the callback and save the full checkpoint."
        )
    groups, states_by_index = states[0]["param_groups"], states[0]["state"]
    mean: dict[str, Tensor] = {}
    precisions: dict[str, Tensor] = {}
    priors: dict[str, float] = {}
    for group, group_names in zip(groups, names, strict=True):
        for index, name in zip(group["params"], group_names, strict=True):
            weights, state = checkpoint["state_dict"][name], states_by_index.get(index, {})
            # Without an update it is a point: frozen, or saved before the first.
            found = state_precision(group, state, weights) if state.get("step") else None
            if found is not None:
                mean[name], precisions[name], priors[name] = weights, found, group["prior_precision"]
    if not mean:
        raise PosteriorError(f"{source} was written before the first update of the posterior, or by OGN, a point.")
    constants = {n: v for n, v in checkpoint["state_dict"].items() if n not in mean and isinstance(v, Tensor)}
    return MeanField(mean, precisions, priors, groups[0]["num_data"], constants)
