"""Reading a posterior from a Lightning checkpoint, without Lightning and without running code from the file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim.readout.distributed_checkpoint import is_distributed_checkpoint, read_distributed_checkpoint
from lightning_bayes.optim.readout.state import Entry, posterior_of
from lightning_bayes.posteriors import FAMILIES, AbstractPosterior, ScaledPosterior, named_if_unreadable, verified_load

# Key of the callbacks' state in a checkpoint: one for the whole family, so that a run can change its arguments.
CALLBACK_KEY = "lightning_bayes"
POSTERIOR_KEY = "lightning_bayes.posterior"  # of a posterior that no optimizer holds, such as Laplace's
SCALE_KEY = "lightning_bayes.PosteriorScale"  # of the width that was chosen for the posterior, see callbacks


def load_posterior(path: str | os.PathLike[str], map_location: str | torch.device = "cpu") -> Any:
    """Load the posterior from a checkpoint of a run with one of the callbacks.

    Args:
        path: A Lightning checkpoint (``last.ckpt``), a file or the directory that `ModelParallelStrategy` writes.
        map_location: Device of the tensors.

    Returns:
        The posterior by parameter name, as the LightningModule names them; see `AbstractPosterior.select` for a
        submodule. With a width that `PosteriorScale` has chosen it is a `ScaledPosterior`. A file that is no Lightning
        checkpoint or holds no posterior is a `PosteriorError`.
    """
    checkpoint = read_checkpoint(path)
    found = posterior_from_checkpoint(checkpoint, str(path)).to(map_location)
    width = checkpoint.get("callbacks", {}).get(SCALE_KEY, {})
    return found if width.get("scale") is None else ScaledPosterior(found, width["scale"], width["linearized"])


def read_checkpoint(path: str | os.PathLike[str], map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Read a Lightning checkpoint without running code from it.

    Args:
        path: The file, or the directory that `ModelParallelStrategy` writes.
        map_location: Device of the tensors.

    Returns:
        Its contents, with at least a ``state_dict``. A file that is damaged or no checkpoint is a `PosteriorError`.
    """
    if is_distributed_checkpoint(Path(path)):
        with named_if_unreadable(path):
            return read_distributed_checkpoint(Path(path), map_location)
    return require_checkpoint(verified_load(path, map_location=map_location), path)


def require_checkpoint(checkpoint: object, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Require the entries that every Lightning checkpoint has.

    Args:
        checkpoint: Contents of a file.
        path: The file.

    Returns:
        The checkpoint.

    Raises:
        PosteriorError: If it has no ``state_dict``.
    """
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise PosteriorError(f"{path} is no Lightning checkpoint: it has no 'state_dict'.")
    return checkpoint


def callback_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the family's callback in a checkpoint.

    Args:
        checkpoint: Contents of a Lightning checkpoint.

    Returns:
        Its `state_dict`; empty without such a callback.
    """
    state: dict[str, Any] = checkpoint.get("callbacks", {}).get(CALLBACK_KEY, {})
    return state


def stored_posterior(checkpoint: Mapping[str, Any]) -> AbstractPosterior | None:
    """The posterior that a callback has written, such as `LaplaceCallback`.

    Args:
        checkpoint: Contents of a Lightning checkpoint.

    Returns:
        The posterior with its constants; None if there is none.
    """
    state = checkpoint.get("callbacks", {}).get(POSTERIOR_KEY, {})
    if "family" not in state:
        return None
    found: Any = FAMILIES[state["family"]].from_state_dict(state["posterior"])
    result: AbstractPosterior = replace(found, constants=_constants(checkpoint, found.mean))
    return result


def _constants(checkpoint: Mapping[str, Any], mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: v for n, v in checkpoint["state_dict"].items() if n not in mean and isinstance(v, Tensor)}


def posterior_from_checkpoint(checkpoint: dict[str, Any], source: str = "The checkpoint") -> AbstractPosterior:
    """Build the posterior from a loaded checkpoint; arguments, result and errors as in `load_posterior`.

    Args:
        checkpoint: Contents of a Lightning checkpoint.
        source: Its name in error messages.

    Returns:
        The posterior.

    Raises:
        PosteriorError: If there is none.
    """
    stored = stored_posterior(checkpoint)
    if stored is not None:
        return stored
    names = callback_state(checkpoint).get("param_names")
    states = checkpoint.get("optimizer_states")
    if not names or not states:
        raise PosteriorError(
            f"{source} holds no posterior: it was written without VOGNCallback, or with save_weights_only=True. "
            "Train with the callback and save the full checkpoint."
        )
    found = posterior_of(_entries(checkpoint, names, states[0]))
    if not found.mean:
        raise PosteriorError(f"{source} was written before the first update of the posterior, or by OGN, a point.")
    return replace(found, constants=_constants(checkpoint, found.mean))


def _entries(checkpoint: dict[str, Any], names: list[list[str]], optimizer: dict[str, Any]) -> Iterator[Entry]:
    """Parameters with at least one update; before that, a parameter is a point."""
    for group, group_names in zip(optimizer["param_groups"], names, strict=True):
        for index, name in zip(group["params"], group_names, strict=True):
            state = optimizer["state"].get(index, {})
            if state.get("step"):
                yield Entry(name, checkpoint["state_dict"][name], group, state)
