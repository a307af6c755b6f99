"""Reading the directory that Lightning's `ModelParallelStrategy` writes: each process's rows, and a file of the rest."""

from __future__ import annotations

import warnings
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

METADATA: Final = "meta.pt"  # what Lightning writes beside the files of torch.distributed.checkpoint


def is_distributed_checkpoint(path: Path) -> bool:
    """Whether a path is the directory of a distributed checkpoint."""
    return path.is_dir() and (path / METADATA).is_file()


def read_distributed_checkpoint(path: Path, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Read a distributed checkpoint in one process, without running code from it.

    Args:
        path: The directory.
        map_location: Device of the tensors.

    Returns:
        The contents that a single file of the same run would have, with whole tensors. Optimizer states have parameter names
        where those of a single file have numbers.
    """
    found: dict[str, Any] = torch.load(path / METADATA, map_location=map_location, weights_only=True)
    for keys, value in _read_values(path, map_location):
        target = found
        for key, following in pairwise(keys):
            target = _enter(target, key, [] if isinstance(following, int) else {})
        _enter(target, keys[-1], value)
    states = sorted(key for key in found if key.startswith("optimizer_") and key != "optimizer_states")
    found["optimizer_states"] = [found.pop(key) for key in states]
    return found


def _enter(target: Any, key: Any, value: Any) -> Any:
    if isinstance(target, list):
        if len(target) == key:
            target.append(value)
        return target[key]
    return target.setdefault(key, value)


def _read_values(path: Path, device: str | torch.device) -> list[tuple[tuple[str | int, ...], Any]]:
    dcp: Any = import_module("torch.distributed.checkpoint")  # here, because it takes a second

    class SafePlanner(dcp.DefaultLoadPlanner):  # type: ignore[misc]
        """Loads objects as tensors and plain values only; the default unpickles them."""

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
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which no_dist asks for
        dcp.load(
            values,
            storage_reader=reader,
            planner=SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )
    return [(metadata.planner_data[name], value) for name, value in values.items()]
