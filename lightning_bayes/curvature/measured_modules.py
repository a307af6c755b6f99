"""The choice of a model's measured modules.

A measured module is one whose calls are measured as a whole: a layer with a rule, or any other module that holds trainable
parameters directly, together with everything below it, by the generic rule. A module with BatchNorm below it is measured for
its own parameters alone, and its children by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules import LayerRule, rule_for
from lightning_bayes.curvature.rules.example_inputs import refuse_packed
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError, name_some
from lightning_bayes.private_torch import BatchNormBase, has_children, own_parameters


@dataclass(frozen=True)
class MeasuredModule:
    """A module whose calls are measured as a whole.

    Attributes:
        name: Qualified name of the module in the model; empty for the model itself.
        module: The module.
        rule: The layer's rule, or None for the generic rule.
        own_alone: Whether the parameters that the module holds itself are measured alone, and its children by themselves.
    """

    name: str
    module: nn.Module
    rule: LayerRule | None
    own_alone: bool = False

    @cached_property
    def label(self) -> str:
        """The name and type as a reader knows them: ``net.fc1 (Linear)``."""
        return f"{self.name or 'the model itself'} ({type(self.module).__name__})"

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The module's parameters by name; a layer without children needs no walk through them."""
        if has_children(self.module) and not self.own_alone:
            return self.module.named_parameters()
        return [(name, p) for name, p in own_parameters(self.module).items() if p is not None]

    def require_examples(self, x: Tensor) -> None:
        """Require an input that holds examples; the generic rule finds out by itself.

        Args:
            x: Input of a call.

        Raises:
            ExampleDimensionError: If it lacks a dimension for them.
        """
        refuse_packed(self.module, [x])
        if self.rule is not None and x.dim() < self.rule.least_dims(self.module):
            raise ExampleDimensionError(
                f"{self.label} got an input of shape {list(x.shape)} without a dimension for examples. Keep the batch in "
                "dimension 0, or freeze the layer."
            )


def find_measured_modules(model: nn.Module) -> list[MeasuredModule]:
    """List the units of `model`, each module once.

    A LightningModule is never a unit itself: its `training_step` need not go through its `forward`. Parameters that it
    holds directly are reached by no rule.

    Args:
        model: The model.

    Returns:
        Every unit that holds a trainable parameter.
    """
    if hasattr(model, "training_step"):
        seen: set[nn.Module] = set()
        return [unit for name, child in model.named_children() for unit in _units(name, child, seen)]
    return list(_units("", model, set()))


def refuse_scripted(model: nn.Module) -> None:
    """Refuse trainable modules that torch.jit has compiled: they cannot be called with other parameters.

    Args:
        model: The model.

    Raises:
        UnsupportedLayerError: Listing them.
    """
    scripted = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    found = [
        name or "the model itself"
        for name, module in scripted
        if any(param is not None and param.requires_grad for param in own_parameters(module).values())
    ]
    if found:
        raise UnsupportedLayerError(
            f"torch.jit has compiled {name_some(found)}, whose forward nothing can look into. Train the modules that they "
            "were made from, or set requires_grad = False on their parameters."
        )


def refuse(reasons: Iterable[tuple[str, list[str]]], advice: str) -> None:
    """Name every offender at once.

    Args:
        reasons: Pairs of a reason and the labels of the modules it holds for.
        advice: The next step, the last sentence of the message.

    Raises:
        UnsupportedLayerError: If a reason holds for anything.
    """
    found = [reason + name_some(labels, 160) for reason, labels in reasons if labels]
    if found:
        raise UnsupportedLayerError(f"{'; '.join(found)}. {advice}")


def tied_parameters(units: Iterable[MeasuredModule]) -> list[str]:
    """Parameters that several units hold, each as ``embed.weight = out.weight``."""
    owners: dict[nn.Parameter, list[str]] = {}
    for unit in units:
        for name, param in unit.module.named_parameters(prefix=unit.name, remove_duplicate=False):
            owners.setdefault(param, []).append(name)
    return [" = ".join(names) for names in owners.values() if names[1:]]


def _units(name: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[MeasuredModule]:
    if module in seen:
        return
    seen.add(module)
    rule = rule_for(module)
    params = module.parameters() if rule is not None else (p for p in own_parameters(module).values() if p is not None)
    if any(param.requires_grad for param in params):
        own_alone = rule is None and any(isinstance(below, BatchNormBase) for below in module.modules())
        yield MeasuredModule(name, module, rule, own_alone)
        if not own_alone:
            return
    for child_name, child in module.named_children():
        yield from _units(f"{name}.{child_name}" if name else child_name, child, seen)
