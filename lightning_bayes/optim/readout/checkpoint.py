"""Loading a posterior from a Lightning checkpoint, without Lightning and without executing code from the file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim.readout.state import Entry, constants_of, posterior_of
from lightning_bayes.posteriors import FAMILIES, AbstractPosterior, ScaledPosterior, verified_load

# Keys of callback states in a checkpoint.
CALLBACK_KEY = "lightning_bayes"  # shared by all variational callbacks, so that a resumed run may change its arguments
POSTERIOR_KEY = "lightning_bayes.posterior"  # a posterior that no optimizer holds, such as Laplace's
SCALE_KEY = "lightning_bayes.PosteriorScale"  # the scale that `PosteriorScale` has chosen


def load_posterior(path: str | os.PathLike[str], map_location: str | torch.device = "cpu") -> Any:
    """Load the posterior from a checkpoint of a run with one of the callbacks.

    Raises `PosteriorError` if the file is not a Lightning checkpoint or contains no posterior.

    Args:
        path: A Lightning checkpoint (``last.ckpt``): a file, or the directory that `ModelParallelStrategy` writes.
        map_location: Device of the tensors.

    Returns:
        The posterior with the LightningModule's parameter names; `AbstractPosterior.select` picks a submodule. A
        `ScaledPosterior` if `PosteriorScale` has chosen a scale.
    """
    checkpoint = read_checkpoint(path)
    posterior = posterior_from_checkpoint(checkpoint, str(path)).to(map_location)
    scale_state = checkpoint.get("callbacks", {}).get(SCALE_KEY, {})
    if scale_state.get("scale") is None:
        return posterior
    return ScaledPosterior(posterior, scale_state["scale"], scale_state["linearized"])


def read_checkpoint(path: str | os.PathLike[str], map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Read a Lightning checkpoint without executing code from it.

    Raises `PosteriorError` if the file is damaged or not a checkpoint.

    Args:
        path: The file.
        map_location: Device of the tensors.

    Returns:
        Its contents, with at least a ``state_dict``.
    """
    return require_checkpoint(verified_load(path, map_location=map_location), path)


def require_checkpoint(checkpoint: object, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the contents of the file `path`; raise `PosteriorError` if they have no ``state_dict``."""
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise PosteriorError(f"{path} is not a Lightning checkpoint: it has no 'state_dict'.")
    return checkpoint


def callback_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the variational callback in a checkpoint; empty if the run had none."""
    state: dict[str, Any] = checkpoint.get("callbacks", {}).get(CALLBACK_KEY, {})
    return state


def stored_posterior(checkpoint: Mapping[str, Any]) -> AbstractPosterior | None:
    """Return the posterior that a callback such as `LaplaceCallback` has saved, or None."""
    state = checkpoint.get("callbacks", {}).get(POSTERIOR_KEY, {})
    if "family" not in state:
        return None
    saved: Any = FAMILIES[state["family"]].from_state_dict(state["posterior"])
    posterior: AbstractPosterior = replace(saved, constants=constants_of(checkpoint["state_dict"], saved.mean))
    return posterior


def posterior_from_checkpoint(checkpoint: dict[str, Any], source: str = "The checkpoint") -> AbstractPosterior:
    """Build the posterior from a loaded checkpoint, without the scale of `PosteriorScale`.

    Args:
        checkpoint: Contents of a Lightning checkpoint.
        source: Name of the checkpoint in error messages.

    Returns:
        The posterior.

    Raises:
        PosteriorError: If the checkpoint contains none.
    """
    stored = stored_posterior(checkpoint)
    if stored is not None:
        return stored
    names = callback_state(checkpoint).get("param_names")
    states = checkpoint.get("optimizer_states")
    if not names or not states:
        raise PosteriorError(
            f"{source} holds no posterior: it was saved without a callback such as VOGNCallback, or with "
            "save_weights_only=True. Train with the callback and save full checkpoints."
        )
    posterior = posterior_of(_entries(checkpoint, names, states[0]))
    if not posterior.mean:
        raise PosteriorError(
            f"{source} was saved before the first update of the posterior, or by a method without noise such as OGN."
        )
    return replace(posterior, constants=constants_of(checkpoint["state_dict"], posterior.mean))


def _entries(checkpoint: dict[str, Any], names: list[list[str]], optimizer: dict[str, Any]) -> Iterator[Entry]:
    """Yield the parameters with at least one update; before that they have no posterior."""
    for group, group_names in zip(optimizer["param_groups"], names, strict=True):
        for index, name in zip(group["params"], group_names, strict=True):
            state = optimizer["state"].get(index, {})
            if state.get("step"):
                yield Entry(name, checkpoint["state_dict"][name], group, state)
