"""Which layer type has which rule.

A rule is one small pure function: from a layer, its input and the gradient with respect to its output to the gradient
contribution of every example, by parameter name:

    rule(layer, input [B, …], grad_output [B, …]) → {"weight": [B, *weight.shape], "bias": [B, *bias.shape]}

A layer type may add a *square rule*, which reaches (Σ_i c_i, Σ_i c_i²) faster than through all c_i, in the memory of a
`Workspace`:

    square_rule(layer, input, grad_output, workspace) → {"weight": (Σ_i c_i, Σ_i c_i²), "bias": …}

Both engines use the same rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.workspace import Workspace

PerExample: TypeAlias = dict[str, Tensor]  # parameter name → [B, *shape]
Sums: TypeAlias = dict[str, tuple[Tensor, Tensor]]  # parameter name → (Σ_i c_i, Σ_i c_i²)
Rule: TypeAlias = Callable[[Any, Tensor, Tensor], PerExample]
SquareRule: TypeAlias = Callable[..., Sums]
InputDims: TypeAlias = int | Callable[[Any], int]

# (layer, its output) → what the square rule would otherwise compute again from the input; None if nothing.
Memory: TypeAlias = Callable[[Any, Tensor], Any]

_RULES: dict[type[nn.Module], Rule] = {}
_SQUARE_RULES: dict[type[nn.Module], SquareRule] = {}
_MEMORIES: dict[type[nn.Module], Memory] = {}
_INPUT_DIMS: dict[type[nn.Module], InputDims] = {}


def per_example_rule(*layers: type[nn.Module], input_dims: InputDims = 2) -> Callable[[Rule], Rule]:
    """Register the decorated function as the per-example rule of `layers`.

    Args:
        layers: Layer types.
        input_dims: Least number of dimensions of an input that holds examples, or a function of the layer.

    Returns:
        The decorator, which returns the function as it is.
    """

    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(layers, rule))
        _INPUT_DIMS.update(dict.fromkeys(layers, input_dims))
        return rule

    return register


def square_rule(*layers: type[nn.Module]) -> Callable[[SquareRule], SquareRule]:
    """Register the decorated function as the shortcut to sums and squares of `layers`."""

    def register(rule: SquareRule) -> SquareRule:
        _SQUARE_RULES.update(dict.fromkeys(layers, rule))
        return rule

    return register


def remembered(*layers: type[nn.Module]) -> Callable[[Memory], Memory]:
    """Register the decorated function: what it returns of a forward is the square rule's argument ``memory``."""

    def register(memory: Memory) -> Memory:
        _MEMORIES.update(dict.fromkeys(layers, memory))
        return memory

    return register


def memory_of(kind: type[nn.Module], layer: nn.Module, output: Tensor) -> Any:
    """What the square rule of `layer` wants to keep of a forward; None if nothing."""
    return _MEMORIES[kind](layer, output) if kind in _MEMORIES else None


def rule_type(layer: nn.Module) -> type[nn.Module] | None:
    """The registered type whose rule holds for `layer`, or None.

    A subclass inherits the rule only if it computes what its parent computes: same forward, same parameters, no
    children (a parametrised layer has some).

    Args:
        layer: Any module.

    Returns:
        The registered type, or None if only the generic rule fits.
    """
    for ancestor in type(layer).__mro__:
        if ancestor in _RULES:
            same_helper = getattr(type(layer), "_conv_forward", None) is getattr(ancestor, "_conv_forward", None)
            plain = {"weight", "bias"} >= layer._parameters.keys() >= {"weight"} and not layer._modules
            return ancestor if computes(layer, ancestor.forward) and same_helper and plain else None
    return None


def computes(layer: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a call of `layer` is a call of `forward`; a copy of a layer may hold it as an attribute of its own."""
    method: Any = layer.forward
    return getattr(method, "__func__", None) is forward and method.__self__ is layer


def input_dims(kind: type[nn.Module], layer: nn.Module) -> int:
    """Least number of dimensions of an input of `layer` that holds examples; with fewer it is one example alone."""
    registered = _INPUT_DIMS[kind]
    return registered if isinstance(registered, int) else registered(layer)


def per_example(kind: type[nn.Module], layer: nn.Module, x: Tensor, grad_output: Tensor) -> PerExample:
    """Every example's contribution to the gradient of every parameter of `layer`."""
    if not len(x):
        return {name: p.new_zeros(0, *p.shape) for name, p in layer.named_parameters()}
    return _RULES[kind](layer, x, grad_output)


def sums(
    kind: type[nn.Module], layer: nn.Module, x: Tensor, grad_output: Tensor, workspace: Workspace, memory: Any = None
) -> Sums:
    """Σ_i c_i and Σ_i c_i² of every parameter of `layer`."""
    if not len(x):
        return {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in layer.named_parameters()}
    if memory is not None:
        return _SQUARE_RULES[kind](layer, x, grad_output, workspace, memory)
    if kind in _SQUARE_RULES:
        return _SQUARE_RULES[kind](layer, x, grad_output, workspace)
    return sums_in_parts(_RULES[kind], layer, x, grad_output, workspace)


def sums_in_parts(rule: Rule, layer: nn.Module, x: Tensor, grad_output: Tensor, workspace: Workspace) -> Sums:
    """Σ_i c_i and Σ_i c_i² from per-example contributions, so many examples at a time as fit the workspace."""
    elements = sum(p.numel() for p in layer.parameters())
    total: Sums = {}
    for x_part, grad_part in workspace.split(elements, x, grad_output):
        for name, part in rule(layer, x_part, grad_part).items():
            add_sums(total, name, part)
    return total


def add_sums(total: Sums, name: str, part: Tensor) -> None:
    """Add the per-example contributions `part` [B, *shape] to `total[name]`; overwrites `part`."""
    grad = part.sum(0)
    square = part.square_().sum(0)  # in place: allocating a second buffer costs more than the arithmetic
    if name in total:
        grad, square = total[name][0].add_(grad), total[name][1].add_(square)
    total[name] = (grad, square)
