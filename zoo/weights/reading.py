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
    "Anything else is refused, because reading it could run code. Save model.state_dict() with torch.save, or as "
    ".safetensors, and check that the file is complete.",
    "Fetch it again.",
)
_NESTED: Final = ("state_dict", "model")  # where training scripts put a model's weights
_PREFIXES: Final = ("module.", "_orig_mod.", "model.")  # of DataParallel, torch.compile and the tasks of this package


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read a model's weights from a ``.safetensors`` file or one of ``torch.save``.

    Args:
        path: The file: a state dict, or a checkpoint that holds one as ``state_dict`` or ``model``.

    Returns:
        Tensors by name, on the CPU; a prefix that all of them share (``model.``, ``module.``) is cut off.

    Raises:
        WeightsError: If there is no file, it is damaged, or it holds objects other than tensors, such as a pickled module.
            Those are not unpickled, because that could run code.
    """
    file = Path(path)
    if not file.is_file():
        raise WeightsError(f"There is no file of weights at {file.absolute()}. Pass the path of a state dict.")
    parse = _read_safetensors if file.suffix == ".safetensors" else None
    return unwrapped(verified_load(file, _WEIGHTS_FILE, parse=parse), str(file))


def _read_safetensors(file: str | os.PathLike[str]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = load_file(file)
    return state


def unwrapped(content: Any, source: str = "The state dict") -> dict[str, Tensor]:
    """The state dict inside of a checkpoint.

    Args:
        content: A state dict, or a dictionary that holds one.
        source: Its name in error messages.

    Returns:
        Tensors by name, without a prefix that all names share.

    Raises:
        WeightsError: If there is no state dict.

    Example:
        >>> import torch
        >>> unwrapped({"epoch": 3, "state_dict": {"model.weight": torch.zeros(1)}})
        {'weight': tensor([0.])}
    """
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise WeightsError(f"{source} holds a {type(content).__name__} instead of a state dict with tensors by name.")
    others = [str(name) for name, value in content.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if others:
        raise WeightsError(f"{source} holds no state dict: {', '.join(others)} are not tensors by name.")
    state = dict(content)
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in state):
            state = {name[len(prefix) :]: value for name, value in state.items()}
    return state
