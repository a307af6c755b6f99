"""The format of posterior files: safetensors, with all other values as JSON in the metadata.

Reading such a file runs no code. Tensors are stored by path, such as ``posterior.mean.conv.weight``, and the JSON refers to
them. Safetensors has no checksum, so the metadata contains one over the tensors and the JSON. Version 1 files were written
by `torch.save`.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from lightning_bayes.errors import PosteriorError
from lightning_bayes.posteriors import FileKind, named_if_unreadable, verified_load

FORMAT: Final = "lightning_bayes.posterior"
VERSION: Final = 2  # increase it if older readers would misread the file

POSTERIOR_FILE: Final = FileKind(
    "a posterior file",
    PosteriorError,
    "Pickles are rejected, because reading one could run code. Otherwise, check that the file is complete.",
    "Restore it from an intact copy, or write it again.",
)
UPGRADE: Final = "Upgrade lightning-bayes if the file is newer; otherwise the file is damaged, so write it again."
_TENSOR, _TUPLE = "$tensor", "$tuple"


def to_bytes(content: Mapping[str, Any]) -> bytes:
    """Serialise nested dictionaries, lists and tuples of tensors and plain values. Keys become strings.

    Returns:
        The bytes of the file.

    Example:
        >>> data = to_bytes({"mean": {"weight": torch.ones(2)}, "num_data": 10})
        >>> b'"mean.weight":{"dtype":"F32","shape":[2]' in data
        True
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_without_tensors(content, "", tensors))
    metadata = {"format": FORMAT, "version": str(VERSION), "content": text, "sha256": _checksum(text, tensors)}
    data: bytes = save(tensors, metadata)
    return data


def read_content(path: str | os.PathLike[str], device: str | torch.device) -> dict[str, Any]:
    """Read a posterior file of any version.

    Args:
        path: The file.
        device: Device of the tensors.

    Returns:
        The argument of `to_bytes`.

    Raises:
        PosteriorError: If the file is damaged, a pickle, or not a posterior file, or if its version is not supported.
    """
    if zipfile.is_zipfile(path) or Path(path).stat().st_size == 0:
        content = verified_load(path, POSTERIOR_FILE, device)
        values: dict[str, Any] = content if isinstance(content, dict) else {}
        _check_format(path, values.get("format"), values.get("version"))
        return values
    with named_if_unreadable(path, POSTERIOR_FILE), safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        version = metadata.get("version", "")
        _check_format(path, metadata.get("format"), int(version) if version.isdigit() else version)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        if _checksum(metadata["content"], tensors) != metadata["sha256"]:
            raise PosteriorError(f"{path} is damaged: its checksum does not match. {POSTERIOR_FILE.instead}")
        on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
        restored: dict[str, Any] = _with_tensors(json.loads(metadata["content"]), on_device)
        return restored


def _check_format(path: str | os.PathLike[str], name: Any, version: Any) -> None:
    if name != FORMAT:
        raise PosteriorError(
            f"{path} is not a posterior file. zoo.save_posterior writes posterior files. Read a Lightning checkpoint with "
            "load_posterior, and a state dict with create_model(..., pretrained=path)."
        )
    if version not in range(1, VERSION + 1):
        raise PosteriorError(
            f"{path} has format version {version!r}, but this package reads versions 1 to {VERSION}. {UPGRADE}"
        )


def _without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Replace each tensor with a reference and copy the tensor into `tensors`."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        prefix = f"{path}." if path else ""
        return {str(key): _without_tensors(inner, f"{prefix}{key}", tensors) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_without_tensors(inner, f"{path}.{index}", tensors) for index, inner in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    return value


def _with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        if value.keys() == {_TUPLE}:
            return tuple(_with_tensors(inner, tensors) for inner in value[_TUPLE])
        return {key: _with_tensors(inner, tensors) for key, inner in value.items()}
    return [_with_tensors(inner, tensors) for inner in value] if isinstance(value, list) else value


def _checksum(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
