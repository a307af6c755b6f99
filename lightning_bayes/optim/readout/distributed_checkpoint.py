"""Reading the checkpoint directory of Lightning's `ModelParallelStrategy`: sharded tensors, and a file of metadata."""

from __future__ import annotations

import warnings
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

METADATA: Final = "meta.pt"  # the file that Lightning adds to the files of torch.distributed.checkpoint


def is_distributed_checkpoint(path: Path) -> bool:
    """Whether `path` is the directory of a distributed checkpoint."""
    return path.is_dir() and (path / METADATA).is_file()


def read_distributed_checkpoint(path: Path, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Read a distributed checkpoint in one process, without executing code from it.

    Args:
        path: The directory.
        map_location: Device of the tensors.

    Returns:
        The contents of the equivalent single-file checkpoint, with whole tensors. Optimizer states are keyed by parameter
        names instead of indices.
    """
    checkpoint: dict[str, Any] = torch.load(path / METADATA, map_location=map_location, weights_only=True)
    for keys, value in _read_values(path, map_location):
        target = checkpoint
        for key, following in pairwise(keys):
            target = _enter(target, key, [] if isinstance(following, int) else {})
        _enter(target, keys[-1], value)
    states = sorted(key for key in checkpoint if key.startswith("optimizer_") and key != "optimizer_states")
    checkpoint["optimizer_states"] = [checkpoint.pop(key) for key in states]
    return checkpoint


def _enter(target: Any, key: Any, value: Any) -> Any:
    """Insert `value` into a list or dict unless `key` exists, and return the entry."""
    if isinstance(target, list):
        if len(target) == key:
            target.append(value)
        return target[key]
    return target.setdefault(key, value)


def _read_values(path: Path, device: str | torch.device) -> list[tuple[tuple[str | int, ...], Any]]:
    dcp: Any = import_module("torch.distributed.checkpoint")  # imported here because it takes a second

    class SafePlanner(dcp.DefaultLoadPlanner):  # type: ignore[misc]
        """Loads objects with ``weights_only=True``; the default planner unpickles them."""

        def load_bytes(self, read_item: Any, value: Any) -> None:
            self.original_state_dict[read_item.dest_index.fqn] = torch.load(
                value, map_location=device, weights_only=True
            )

    reader = dcp.FileSystemReader(path)
    metadata = reader.read_metadata()
    values: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device=device) if hasattr(entry, "size") else None
        for name, entry in metadata.state_dict_metadata.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended, by no_dist
        dcp.load(
            values,
            storage_reader=reader,
            planner=SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )
    return [(metadata.planner_data[name], value) for name, value in values.items()]
