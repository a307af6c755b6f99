"""Outputs of several tensors as one, so that samples of them can be stacked and averaged."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from lightning_bayes.private_torch import tree_flatten, tree_unflatten


@final
class PackedOutputs:
    """Packs nested tuples, lists and dictionaries of tensors ``[batch, …]`` into one ``[batch, columns]``, and back."""

    def __init__(self) -> None:
        self._spec: Any = None
        self._shapes: list[torch.Size] = []  # without the batch; empty for a single tensor

    def pack(self, output: Any) -> Tensor | None:
        """One tensor; None if the output holds anything but tensors with one row per example."""
        if isinstance(output, Tensor):
            self._shapes = []
            return output
        leaves, self._spec = tree_flatten(output)
        rows = {len(leaf) if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves}
        if len(rows) != 1 or None in rows:
            return None
        self._shapes = [leaf.shape[1:] for leaf in leaves]
        return torch.cat([leaf.reshape(len(leaf), -1) for leaf in leaves], 1)

    def unpack(self, packed: Tensor) -> Any:
        """The output of the packed structure, with any number of rows."""
        if not self._shapes:
            return packed
        parts = torch.split(packed, [shape.numel() for shape in self._shapes], 1)
        leaves = [part.reshape(len(part), *shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return tree_unflatten(leaves, self._spec)
