"""Calls of a module's children without the module, as `model.encode(x)` beside `model(x)`.

The generic rule measures a module with parameters of its own together with its children, in the calls of that module. Uses
elsewhere fail the check, and the loop over examples measures them. It needs to know that these outputs hold examples.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature.layer_graph import LAYER
from lightning_bayes.curvature.measured_modules import MeasuredModule, Uncopied
from lightning_bayes.private_torch import own_parameters, tree_leaves


def mark_parts(unit: MeasuredModule, is_inside: Callable[[], bool], undo: ExitStack) -> None:
    """Mark the outputs of a unit's children that are called without the unit: its rule does not measure these uses."""

    def mark(module: Any, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not is_inside():
            for leaf in tree_leaves(output):
                node: Any = leaf.grad_fn if isinstance(leaf, Tensor) else None
                if node is not None:
                    node.metadata[LAYER] = unit

    for module in unit.module.modules():
        if module is not unit.module and own_parameters(module):
            undo.callback(module.register_forward_hook(Uncopied(mark)).remove)
