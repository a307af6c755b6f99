"""The registry of layer rules.

A rule is a small pure function of a layer, the arguments of its forward and the gradient of its output. It returns the
contribution of each example to the gradient of each parameter, by parameter name:

    @layer_rule(nn.Linear, parameters=("weight", "bias"))
    def linear(layer, inputs, grad_output):        # inputs (x [B, …],)    grad_output [B, …]
        return {"weight": …, "bias": …}            # [B, *weight.shape], [B, *bias.shape]

`inputs` holds the arguments in the order of the forward's signature, including defaults. `grad_output` is a tensor; if the
forward returns several outputs, it is a tuple with a tensor or None for each. Parameters of children have dotted names, such
as ``"out_proj.weight"``.

A layer type may add a faster computation of the squares, which uses the memory of a `Workspace`:

    @linear.fast_squares
    def linear_squares(layer, inputs, grad_output, workspace):    # → {"weight": Σ_i c_i², "bias": …}

A rule whose batch cannot be divided into parts, or whose c_i are mostly zero, may add `fast_sums`, which returns the pairs
(Σ_i c_i, Σ_i c_i²).

Importing `lightning_bayes.curvature.rules` registers every rule in this folder. A rule elsewhere is registered when its
module is imported. All engines use the same rules. tests/contracts/test_rules.py checks each rule on its `cases`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor, nn

from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.private_torch import has_children, own_parameters

Inputs: TypeAlias = tuple[Any, ...]
PerExample: TypeAlias = dict[str, Tensor]  # parameter name → c_i, [B, *shape]
Squares: TypeAlias = dict[str, Tensor]  # parameter name → Σ_i c_i²
Sums: TypeAlias = dict[str, tuple[Tensor, Tensor]]  # parameter name → (Σ_i c_i, Σ_i c_i²)
Contributions: TypeAlias = Callable[[Any, Inputs, Any], PerExample]
ExampleDims: TypeAlias = tuple[int | None, ...]
Case: TypeAlias = tuple[Callable[[], nn.Module], tuple[int, ...] | Callable[[Generator], Inputs]]


@dataclass(eq=False)
class LayerRule:
    """The rule for one or more layer types. Calling it calls the function that `layer_rule` decorates.

    Attributes:
        contributions: The decorated function.
        parameters: Names of all parameters that such a layer may have.
        input_dims: Minimum number of dimensions of a batched first input, or a function of the layer.
        example_dims: The batch dimension of each input, None for an input that all examples share. Inputs beyond the tuple
            are shared. Or a function of the layer and the inputs that returns this tuple.
        applies: Whether the rule is valid for a layer of these types with these parameters.
        repeats_noise: Whether the rule repeats a random forward. It then runs with the random numbers of that forward.
        takes_positions: Whether all dimensions before the features are equivalent, so that rows may be positions of one
            example.
        cases: Layers and inputs for the contract tests: a function that builds the layer, and the shape of its input or a
            function that draws its inputs.
        later_dims: Batch dimensions of the outputs after the first. Further outputs are batched like the first.
        own_only: Whether the rule covers only the parameters that the layer holds itself. Its children are then measured by
            their own rules.
        prepare: Converts the arguments of a call to the rule's inputs, for layers that accept several forms.
        saved: From the layer and its output, the forward results that the fast functions reuse, or None.
    """

    contributions: Contributions
    parameters: tuple[str, ...]
    input_dims: int | Callable[[Any], int] = 2
    example_dims: ExampleDims | Callable[[Any, Inputs], ExampleDims] = (0,)
    applies: Callable[[Any], bool] = lambda layer: True
    repeats_noise: Callable[[Any], bool] = lambda layer: False
    takes_positions: bool = False
    cases: Sequence[Case] = ()
    later_dims: tuple[int, ...] = ()
    own_only: bool = False
    prepare: Callable[[Any, Inputs], Inputs] = lambda layer, inputs: inputs
    saved: Callable[[Any, Any], Any] = lambda layer, output: None
    _fast_squares: Callable[..., Squares] | None = None
    _fast_sums: Callable[..., Sums] | None = None

    def fast_squares(self, function: Callable[..., Squares]) -> Callable[..., Squares]:
        """Register the decorated ``(layer, inputs, grad_output, workspace) → Squares``."""
        self._fast_squares = function
        return function

    def fast_sums(self, function: Callable[..., Sums]) -> Callable[..., Sums]:
        """Register the decorated ``(layer, inputs, grad_output, workspace) → Sums``."""
        self._fast_sums = function
        return function

    def saved_from_forward(self, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Register the decorated ``(layer, output)``, whose result is the last argument of the fast functions."""
        self.saved = function
        return function

    def __call__(self, layer: nn.Module, inputs: Inputs, grad_output: Any) -> PerExample:
        """The contribution of each example to the gradient of each parameter of `layer`."""
        if not self.num_examples(layer, inputs):
            return {name: p.new_zeros(0, *p.shape) for name, p in layer.named_parameters()}
        return self.contributions(layer, inputs, grad_output)

    def sums(self, layer: nn.Module, inputs: Inputs, grad_output: Any, workspace: Workspace, saved: Any = None) -> Sums:
        """Σ_i c_i and Σ_i c_i² for each parameter of `layer`."""
        if not self.num_examples(layer, inputs):
            return {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in layer.named_parameters()}
        if self._fast_sums is None:
            return self.sums_in_parts(layer, inputs, grad_output, workspace)
        extra = () if saved is None else (saved,)
        return self._fast_sums(layer, inputs, grad_output, workspace, *extra)

    def squares(
        self, layer: nn.Module, inputs: Inputs, grad_output: Any, workspace: Workspace, saved: Any = None
    ) -> Squares:
        """Σ_i c_i² for each parameter of `layer`."""
        if self._fast_squares is None or not inputs[0].numel():
            sums = self.sums(layer, inputs, grad_output, workspace, saved)
            return {name: square for name, (_, square) in sums.items()}
        extra = () if saved is None else (saved,)
        return self._fast_squares(layer, inputs, grad_output, workspace, *extra)

    def sums_in_parts(self, layer: nn.Module, inputs: Inputs, grad_output: Any, workspace: Workspace) -> Sums:
        """Σ_i c_i and Σ_i c_i² from the contributions of as many examples at a time as fit the workspace."""
        size = workspace.examples_at_once(sum(p.numel() for p in layer.parameters()))
        total: Sums = {}
        for start in range(0, self.num_examples(layer, inputs), size):
            part_inputs, part_grad = self.select(layer, inputs, grad_output, start, size)
            for name, part in self.contributions(layer, part_inputs, part_grad).items():
                add_sums(total, name, part)
        return total

    def prepared(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """The rule's inputs in a call: the arguments in the order of the forward's signature, including defaults."""
        signature, defaults = _signature(type(layer).forward)
        if not kwargs and inspect.Parameter.empty not in defaults[len(args) :]:
            return self.prepare(layer, (*args, *defaults[len(args) :]))
        bound = signature.bind(layer, *args, **kwargs)
        bound.apply_defaults()
        return self.prepare(layer, tuple(bound.arguments.values())[1:])

    def dims(self, layer: nn.Module, inputs: Inputs) -> ExampleDims:
        """The batch dimension of each input, None for an input that all examples share."""
        dims = self.example_dims if isinstance(self.example_dims, tuple) else self.example_dims(layer, inputs)
        num_shared = max(0, len(inputs) - len(dims))
        return (*dims[: len(inputs)], *[None] * num_shared)

    def num_examples(self, layer: nn.Module, inputs: Inputs) -> int:
        """Number of examples, read from the first input."""
        size: int = inputs[0].shape[self.dims(layer, inputs)[0] or 0]
        return size

    def least_dims(self, layer: nn.Module) -> int:
        """Minimum number of dimensions of a batched first input; one with fewer dimensions is a single unbatched example."""
        return self.input_dims if isinstance(self.input_dims, int) else self.input_dims(layer)

    def select(self, layer: nn.Module, inputs: Inputs, grad_output: Any, start: int, count: int) -> tuple[Inputs, Any]:
        """Inputs and output gradients of `count` examples from index `start`; outputs are batched like the first input."""
        dims, stop = self.dims(layer, inputs), start + count
        selected = tuple(_narrowed(value, dim, start, stop) for value, dim in zip(inputs, dims, strict=True))
        return selected, _narrowed(grad_output, dims[0], start, stop)


_RULES: dict[type[nn.Module] | str, LayerRule] = {}


def layer_rule(
    *layers: type[nn.Module] | str, parameters: tuple[str, ...], **options: Any
) -> Callable[[Contributions], LayerRule]:
    """Register the decorated function as the rule for layer types or qualified names; arguments as in `LayerRule`."""

    def register(function: Contributions) -> LayerRule:
        rule = LayerRule(function, parameters, **options)
        rule.__doc__ = function.__doc__
        _RULES.update(dict.fromkeys(layers, rule))
        return rule

    return register


def registered_rules() -> dict[type[nn.Module] | str, LayerRule]:
    """All rules, by layer type or qualified name."""
    return dict(_RULES)


def rule_for(layer: nn.Module) -> LayerRule | None:
    """The rule for `layer`, or None if only the generic rule applies."""
    ancestor: Any
    for ancestor in type(layer).__mro__:
        rule = _RULES.get(ancestor) or _RULES.get(f"{ancestor.__module__}.{ancestor.__qualname__}")
        if rule is not None:
            # A subclass has the parent's rule only with the same forward and parameters; parametrised layers have others.
            inherits = computes(layer, ancestor.forward) and _has_only(layer, rule)
            return rule if inherits and rule.applies(layer) else None
    return None


def computes(layer: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether calling `layer` calls `forward`, bound to this layer; an instance attribute may override the method."""
    method: Any = layer.forward
    return getattr(method, "__func__", None) is forward and method.__self__ is layer


def draws(*shapes: tuple[int, ...]) -> Callable[[Generator], Inputs]:
    """Inputs for `cases`: normal random numbers in float64, one tensor per shape."""
    return lambda generator: tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)


def add_sums(total: Sums, name: str, part: Tensor) -> None:
    """Add the per-example contributions `part` [B, *shape] to `total[name]`; overwrites `part`."""
    grad = part.sum(0)
    square = part.square_().sum(0)  # in place: allocating a second buffer costs more than the arithmetic
    if name in total:
        grad, square = total[name][0].add_(grad), total[name][1].add_(square)
    total[name] = (grad, square)


def _has_only(layer: nn.Module, rule: LayerRule) -> bool:
    """Whether `layer` has the rule's first parameter itself, and no parameters that the rule does not cover."""
    if rule.parameters[0] not in own_parameters(layer):
        return False
    if rule.own_only or not has_children(layer):
        return all(name in rule.parameters for name, param in own_parameters(layer).items() if param is not None)
    return all(name in rule.parameters for name, _ in layer.named_parameters(remove_duplicate=False))


@lru_cache(maxsize=256)
def _signature(forward: Callable[..., Any]) -> tuple[inspect.Signature, tuple[Any, ...]]:
    """The forward's signature, and the default of each argument after ``self``."""
    signature = inspect.signature(forward)
    return signature, tuple(parameter.default for parameter in list(signature.parameters.values())[1:])


def _narrowed(value: Any, dim: int | None, start: int, stop: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_narrowed(element, dim, start, stop) for element in value)
    if dim is None or not isinstance(value, Tensor):
        return value
    stop = min(stop, value.shape[dim])
    return value.narrow(dim, start, stop - start)
