"""Selection of the modules that an engine measures, called units.

The calls of a unit are measured as a whole. A unit is either a layer with a rule, or any other module that holds trainable
parameters directly. The generic rule measures the latter together with all of its children. Exceptions: if such a module
contains BatchNorm, or has a rule for its own parameters only, its children are units, and it is measured without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.layer_graph import LAYER
from lightning_bayes.curvature.rules import LayerRule, rule_for
from lightning_bayes.curvature.rules.example_inputs import refuse_packed
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError, name_some
from lightning_bayes.likelihood.module_outputs import Uncopied
from lightning_bayes.private_torch import BatchNormBase, has_children, own_parameters, tree_leaves


@dataclass(frozen=True)
class MeasuredModule:
    """A module whose calls are measured as a whole."""

    name: str  # qualified name in the model; empty for the model itself
    module: nn.Module
    rule: LayerRule | None  # None for the generic rule
    direct_only: bool = False  # whether only the parameters that the module holds directly are measured

    @cached_property
    def label(self) -> str:
        """Name and type for messages: ``net.fc1 (Linear)``."""
        return f"{self.name or 'the model itself'} ({type(self.module).__name__})"

    @cached_property
    def params(self) -> dict[str, nn.Parameter]:
        """The parameters that are measured with this module, by name."""
        if has_children(self.module) and not self.direct_only:
            return dict(self.module.named_parameters())
        return {name: p for name, p in own_parameters(self.module).items() if p is not None}

    def refuse_input(self, x: Any) -> NoReturn:
        """Raise an error for a first input without a dimension for examples, or one that no rule takes."""
        refuse_packed(self.module, [x])
        raise ExampleDimensionError(
            f"{self.label} got an input of shape {list(x.shape)} without a dimension for examples. Keep the batch in "
            "dimension 0; call the layer once for all examples as layer(x[None])[0]; or freeze it."
        )


def find_measured_modules(model: nn.Module) -> list[MeasuredModule]:
    """List the units of `model` that hold trainable parameters, each module once."""
    # A LightningModule is never a unit: its training_step need not call its forward. So no rule measures parameters that it
    # holds directly.
    if hasattr(model, "training_step"):
        seen: set[nn.Module] = set()
        return [unit for name, child in model.named_children() for unit in _units(name, child, seen)]
    return list(_units("", model, set()))


def has_only_scalars(output: Any) -> bool:
    """Whether a module returns scalars, as losses with parameters do: the check leaves those without a rule to the loop."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return bool(tensors) and not any(tensor.dim() for tensor in tensors)


def mark_parts(unit: MeasuredModule, is_inside: Callable[[], bool], undo: ExitStack) -> None:
    """Mark the outputs of a unit's children that are called without the unit, as ``model.encode(x)`` beside ``model(x)``."""
    # The unit's rule does not measure these uses. They fail the check, and the loop over examples measures them. It needs to
    # know that these outputs hold examples.

    def mark(module: Any, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not is_inside():
            for leaf in tree_leaves(output):
                node: Any = leaf.grad_fn if isinstance(leaf, Tensor) else None
                if node is not None:
                    node.metadata[LAYER] = unit

    for module in unit.module.modules():
        if module is not unit.module and own_parameters(module):
            undo.callback(module.register_forward_hook(Uncopied(mark)).remove)


def refuse_scripted(model: nn.Module) -> None:
    """Refuse trainable modules compiled by torch.jit: they cannot be called with other parameters."""
    scripted = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    trainable = [
        name or "the model itself"
        for name, module in scripted
        if any(param.requires_grad for param in module.parameters(recurse=False))
    ]
    if trainable:
        raise UnsupportedLayerError(
            f"torch.jit has compiled {name_some(trainable)}, so their forward cannot be measured. Train the original "
            "modules, or set requires_grad = False on their parameters."
        )


def refuse(reasons: Iterable[tuple[str, list[str]]], advice: str) -> None:
    """Raise one error that lists the labels of all reasons, if there are any; `advice` is its last sentence."""
    problems = [reason + name_some(labels, 160) for reason, labels in reasons if labels]
    if problems:
        raise UnsupportedLayerError(f"{'; '.join(problems)}. {advice}")


def tied_parameters(units: Iterable[MeasuredModule]) -> list[str]:
    """Parameters that several units share, in the form ``embed.weight = out.weight``."""
    owners: dict[nn.Parameter, list[str]] = {}
    for unit in units:
        for name, param in unit.module.named_parameters(prefix=unit.name, remove_duplicate=False):
            owners.setdefault(param, []).append(name)
    return [" = ".join(names) for names in owners.values() if names[1:]]


def _units(name: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[MeasuredModule]:
    if module in seen:
        return
    seen.add(module)
    own = [param for param in own_parameters(module).values() if param is not None]
    rule = rule_for(module) if own else None
    holds_all = rule is not None and not rule.own_only
    if any(param.requires_grad for param in (module.parameters() if holds_all else own)):
        direct_only = _has_batch_norm(module) if rule is None else rule.own_only
        yield MeasuredModule(name, module, rule, direct_only)
        if not direct_only:
            return
    for child_name, child in module.named_children():
        yield from _units(f"{name}.{child_name}" if name else child_name, child, seen)


def _has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(below, BatchNormBase) for below in module.modules())
