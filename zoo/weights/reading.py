"""Reading weights from a file without running code from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file
from torch import Tensor

from lightning_bayes.errors import WeightsError
from lightning_bayes.posteriors import FileKind, verified_load

_WEIGHTS_FILE: Final = FileKind(
    "plain tensors",
    WeightsError,
    "Anything else is rejected, because reading it could run code. Save model.state_dict() with torch.save, or as "
    ".safetensors, and check that the file is complete.",
    "Download it again.",
)
_NESTED: Final = ("state_dict", "model")  # keys under which training scripts store a model's weights
_PREFIXES: Final = ("module.", "_orig_mod.", "model.")  # DataParallel, torch.compile, and the tasks of this package


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read a model's weights from a ``.safetensors`` file or a ``torch.save`` file.

    Args:
        path: A state dict, or a checkpoint with a state dict under the key ``state_dict`` or ``model``.

    Returns:
        Tensors by name, on the CPU, without a prefix that all names share (``model.``, ``module.``).

    Raises:
        WeightsError: If the file is missing or damaged, or contains objects other than tensors, such as a pickled module.
            Such objects are not unpickled, because that could run code.
    """
    file = Path(path)
    if not file.is_file():
        raise WeightsError(f"There is no weights file at {file.absolute()}. Pass the path of a state dict.")
    parse = load_file if file.suffix == ".safetensors" else None
    return unwrapped(verified_load(file, _WEIGHTS_FILE, parse=parse), str(file))


def unwrapped(content: Any, source: str = "The state dict") -> dict[str, Tensor]:
    """Extract the state dict from a checkpoint.

    Args:
        content: A state dict, or a checkpoint that contains one.
        source: Name of the checkpoint in error messages.

    Returns:
        Tensors by name, without a prefix that all names share.

    Raises:
        WeightsError: If `content` has no state dict.

    Example:
        >>> import torch
        >>> unwrapped({"epoch": 3, "state_dict": {"model.weight": torch.zeros(1)}})
        {'weight': tensor([0.])}
    """
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise WeightsError(f"{source} is a {type(content).__name__}, not a state dict of tensors by name.")
    others = [str(name) for name, value in content.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if others:
        raise WeightsError(f"{source} is not a state dict of tensors by name; other entries: {', '.join(others)}.")
    state = dict(content)
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state
