"""Selection of the modules that an engine measures, called units.

The calls of a unit are measured as a whole. A unit is either a layer with a rule, or any other module that holds trainable
parameters directly. The generic rule measures the latter together with all of its children. Exceptions: if such a module
contains BatchNorm, or has a rule for its own parameters only, its children are units, and it is measured without them. The
fused engine measures parameters beside children at the functions that take them, so there the children are units, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_bayes.curvature.layer_graph import LAYER
from lightning_bayes.curvature.rules import LayerRule, rule_for
from lightning_bayes.curvature.rules.example_inputs import refuse_packed
from lightning_bayes.errors import ExampleDimensionError, NoMeasurementError, UnsupportedLayerError, name_some
from lightning_bayes.likelihood.module_outputs import Uncopied
from lightning_bayes.private_torch import BatchNormBase, has_children, own_parameters, tree_leaves


@dataclass(frozen=True)
class MeasuredModule:
    """A module whose calls are measured as a whole."""

    name: str  # qualified name in the model; empty for the model itself
    module: nn.Module
    rule: LayerRule | None  # None for the generic rule
    direct_only: bool = False  # whether only the parameters that the module holds directly are measured
    at_operations: bool = False  # whether these are measured at the functions that take them
    only: frozenset[str] | None = (
        None  # the names of the parameters that an operation takes; None for a call of the module
    )

    @cached_property
    def label(self) -> str:
        """Name and type for messages: ``net.fc1 (Linear)``."""
        return f"{self.name or 'the model itself'} ({type(self.module).__name__})"

    @cached_property
    def params(self) -> dict[str, nn.Parameter]:
        """The parameters that are measured with this module, by name."""
        if has_children(self.module) and not self.direct_only:
            return dict(self.module.named_parameters())
        own = {name: p for name, p in own_parameters(self.module).items() if p is not None}
        return own if self.only is None else {name: p for name, p in own.items() if name in self.only}

    @cached_property
    def parts(self) -> list[nn.Module]:
        """The modules that run when the unit is measured."""
        if self.only is not None:
            return []
        return list(self.module.modules()) if has_children(self.module) else [self.module]

    def refuse_input(self, x: Any) -> NoReturn:
        """Raise an error for a first input without a dimension for examples, or one that no rule takes."""
        refuse_packed(self.module, [x])
        raise ExampleDimensionError(
            f"{self.label} got an input of shape {list(x.shape)} without a dimension for examples. Keep the batch in "
            "dimension 0; call the layer once for all examples as layer(x[None])[0]; or freeze it."
        )


def find_measured_modules(
    model: nn.Module, *, at_operations: bool = False, whole: Collection[nn.Module] = ()
) -> list[MeasuredModule]:
    """List the units of `model` that hold trainable parameters, each module once.

    Args:
        model: The model.
        at_operations: Whether parameters outside layers are measured at the functions that take them (`operands`).
        whole: The modules whose parameters are not.

    Returns:
        The units.
    """
    search = _Search(at_operations, whole)
    # A LightningModule is never a unit: its training_step need not call its forward. So no rule measures parameters that it
    # holds directly.
    if not hasattr(model, "training_step"):
        return list(search.units("", model))
    own = [p for p in own_parameters(model).values() if p is not None and p.requires_grad]
    found = [MeasuredModule("", model, None, True, True)] if own and at_operations and model not in whole else []
    return [*found, *(unit for name, child in model.named_children() for unit in search.units(name, child))]


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


class _Search:
    """A walk through a model."""

    def __init__(self, at_operations: bool, whole: Collection[nn.Module]) -> None:
        self.at_operations, self.whole, self.seen = at_operations, whole, set[nn.Module]()

    def units(self, name: str, module: nn.Module) -> Iterator[MeasuredModule]:
        """Yield the units of a module."""
        if module in self.seen:
            return
        self.seen.add(module)
        own = [param for param in own_parameters(module).values() if param is not None]
        rule = rule_for(module) if own else None
        holds_operands = rule is None and self._holds_operands(module)
        holds_all = rule is not None and not rule.own_only
        if any(param.requires_grad for param in (module.parameters() if holds_all else own)):
            direct_only = holds_operands or (_has_batch_norm(module) if rule is None else rule.own_only)
            yield MeasuredModule(name, module, rule, direct_only, holds_operands)
            if not direct_only:
                return
        for child_name, child in module.named_children():
            yield from self.units(f"{name}.{child_name}" if name else child_name, child)

    def _holds_operands(self, module: nn.Module) -> bool:
        """Whether a module passes its own parameters to functions, beside its children or without a forward."""
        has_own_functions = isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) or is_parametrized(module)
        forward = getattr(type(module), "forward", None)  # which a scripted class does not have
        has_others = has_children(module) or forward is nn.Module.forward
        return self.at_operations and has_others and not has_own_functions and module not in self.whole


def _has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(below, BatchNormBase) for below in module.modules())


def refuse_unmeasured(missed: list[str], *, has_factors: bool) -> NoReturn:
    """Refuse a pass in which parameters have gradients that no rule measured, or in which no layer was called."""
    if not missed:
        raise NoMeasurementError(
            "No trainable layer was called with gradients enabled, so there is nothing to measure. Run forward and "
            "backward inside the pass, on the model the engine was built for."
        )
    others = " Or use VOGN or IVON, which take such parameters." if has_factors else ""
    raise UnsupportedLayerError(
        f"No curvature rule can measure {missed[0]}: it gets a gradient outside of its module's forward, or the "
        "rows of its layer are not the examples, such as the nodes of graphs. Move it into a small nn.Module that "
        "is called on the batch, or freeze it with requires_grad_(False). "
        f"Parameters: {name_some(missed)}.{others}"
    )
