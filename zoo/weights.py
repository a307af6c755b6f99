"""Pretrained weights: download them, read them without running code, and load them strictly; only the head may differ."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_bayes.errors import WeightsError
from lightning_bayes.posteriors import FileKind, verified_load
from lightning_bayes.zoo.transforms import ImageTransform

_WEIGHTS_FILE: Final = FileKind(
    "plain tensors",
    WeightsError,
    "Anything else is rejected, because reading it could run code. Save model.state_dict() with torch.save, or as "
    ".safetensors, and check that the file is complete.",
    "Download it again.",
)
_NESTED: Final = ("state_dict", "model")  # keys under which training scripts store a model's weights
_PREFIXES: Final = ("module.", "_orig_mod.", "model.")  # DataParallel, torch.compile, and the tasks of this package
_COUNTER: Final = (
    "num_batches_tracked"  # BatchNorm counter: missing in files from before torch 0.4.1, unused in prediction
)


class PublishedWeights(NamedTuple):
    """Weights with their input transform."""

    state: dict[str, Tensor]
    transform: ImageTransform | None  # None if unknown
    source: str  # for messages


def fetch(url: str) -> Path:
    """The path of a URL in torch.hub's cache. Downloads the file if needed; raises WeightsError if that fails."""
    name = os.path.basename(url)
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if path.is_file():
        return path
    digest = re.search(r"-([0-9a-f]{8,})\.", name)  # such as f37072fd in resnet18-f37072fd.pth
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), hash_prefix=digest and digest[1])
    except (OSError, RuntimeError) as error:  # no network, no write permission, or a hash mismatch
        raise WeightsError(
            f"{url} could not be downloaded ({error}). Without network access, download it elsewhere and copy it to {path}, "
            f"or pass the path of the file: pretrained='.../{name}'."
        ) from error
    return path


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read a model's weights from a ``.safetensors`` file or a ``torch.save`` file."""
    file = Path(path)
    if not file.is_file():
        raise WeightsError(f"There is no weights file at {file.absolute()}. Pass the path of a state dict.")
    parse = load_file if file.suffix == ".safetensors" else None
    return unwrapped(verified_load(file, _WEIGHTS_FILE, parse=parse), str(file))


def unwrapped(content: Any, source: str = "The state dict") -> dict[str, Tensor]:
    """Extract the state dict from a checkpoint."""
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


def load_weights(
    model: nn.Module, state: Mapping[str, Tensor], source: str = "The state dict", replace_head: bool | None = None
) -> None:
    """Load a state dict into a model, in place."""
    current = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    head = {name for name in current if _is_part(name, head_name(model))}
    if replace_head is None:
        replace_head = _has_other_classes(current, state, head)
    skipped = head if replace_head else set()
    expected = {name: value for name, value in current.items() if name not in skipped}
    loaded = {name: value for name, value in state.items() if name not in skipped}
    mismatches = [f"{problem}: {', '.join(names)}" for problem, names in _mismatches(expected, loaded).items() if names]
    if mismatches:
        raise WeightsError(
            f"{source} does not fit {type(model).__name__} ({'; '.join(mismatches)}). Build the model with the name and "
            "arguments that the weights were trained with."
        )
    model.load_state_dict(loaded, strict=False)  # the keys have been compared above
    if skipped:
        rank_zero_info(f"{source}: the head ({', '.join(sorted(skipped))}) is not loaded and keeps its current values.")


def head_name(model: nn.Module) -> tuple[str, ...]:
    """Find the layers that compute the logits."""
    config = getattr(model, "pretrained_cfg", None)
    named = config.get("classifier") if isinstance(config, Mapping) else None
    if named:
        return (named,) if isinstance(named, str) else tuple(named)
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise WeightsError(f"{type(model).__name__} has no linear layer to use as its head.")
    return (linear[-1],)


def _is_part(name: str, layers: tuple[str, ...]) -> bool:
    return any(not layer or name.startswith(f"{layer}.") for layer in layers)


def _has_other_classes(current: Mapping[str, Tensor], state: Mapping[str, Tensor], head: set[str]) -> bool:
    """Whether the head differs only in dimension 0, the classes."""
    if not all(name in state for name in head):
        return False
    shapes = [(current[name].shape, state[name].shape) for name in head]
    return all(old and new and old[1:] == new[1:] and old[0] != new[0] for old, new in shapes)


def _mismatches(expected: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> dict[str, list[str]]:
    shared = [name for name in expected if name in loaded]
    wrong_type = [name for name in shared if not _is_copyable(loaded[name], expected[name])]
    return {
        "missing": [name for name in expected if name not in loaded and not name.endswith(_COUNTER)],
        "unexpected": [name for name in loaded if name not in expected],
        "wrong shape": [
            f"{name} {list(loaded[name].shape)} instead of {list(expected[name].shape)}"
            for name in shared
            if loaded[name].shape != expected[name].shape
        ],
        "wrong type": [f"{name} {_type_name(loaded[name])}" for name in wrong_type],
        "not finite": [name for name in shared if name not in wrong_type and not torch.isfinite(loaded[name]).all()],
    }


def _is_copyable(source: Tensor, target: Tensor) -> bool:
    """Whether `source` has dense values of the same kind as `target`: integer, real or complex, at any precision."""
    same_kind = source.is_complex() == target.is_complex() and source.is_floating_point() == target.is_floating_point()
    return same_kind and source.layout == torch.strided and not source.is_meta


def _type_name(value: Tensor) -> str:
    parts = [str(value.dtype)]
    if value.layout != torch.strided:
        parts.append(str(value.layout))
    if value.is_meta:
        parts.append("meta")
    return " ".join(part.removeprefix("torch.") for part in parts)
