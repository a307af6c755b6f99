"""The rule of each layer type.

A rule is a small pure function: from a layer, the arguments of its forward and the gradient of its output to every
example's contribution to the gradient of each parameter, by the parameter's name:

    @layer_rule(nn.Linear, parameters=("weight", "bias"))
    def linear(layer, inputs, grad_output):        # inputs (x [B, …],)    grad_output [B, …]
        return {"weight": …, "bias": …}            # [B, *weight.shape], [B, *bias.shape]

`inputs` holds the arguments in the order of the forward's signature, with defaults filled in. `grad_output` is a tensor, or
a tuple with a tensor or None for each where the forward returns several. Parameters of children have dotted names, such as
``"out_proj.weight"``.

A layer type may add faster ways to the sums, in the memory of a `Workspace`, with what its forward has computed already:

    @linear.fast_sums
    def linear_sums(layer, inputs, grad_output, workspace):    # → {"weight": (Σ_i c_i, Σ_i c_i²), "bias": …}

Every rule in this folder is registered on import of `lightning_bayes.curvature.rules`; a rule elsewhere, where its own
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
Sums: TypeAlias = dict[str, tuple[Tensor, Tensor]]  # parameter name → (Σ_i c_i, Σ_i c_i²)
Contributions: TypeAlias = Callable[[Any, Inputs, Any], PerExample]
ExampleDims: TypeAlias = tuple[int | None, ...]
Case: TypeAlias = tuple[Callable[[], nn.Module], tuple[int, ...] | Callable[[Generator], Inputs]]


def _as_they_are(layer: nn.Module, inputs: Inputs) -> Inputs:
    return inputs


@dataclass(eq=False)
class LayerRule:
    """The rule of some layer types; call it as the function that `layer_rule` decorates.

    Attributes:
        contributions: The decorated function.
        parameters: Names of the parameters that it covers.
        input_dims: Least number of dimensions of a first input that holds examples, or a function of the layer.
        example_dims: The dimension of each input that holds the examples, None for an input that all examples share;
            inputs beyond the tuple are shared. Or a function of the layer and the inputs.
        applies: Whether the rule holds for a layer of its types with these parameters.
        by_hooks: Whether a backward hook of the layer, as BackPACK's, sees the gradients of all outputs.
        repeats_noise: Whether the rule puts a layer's inputs through it again, with noise: it is called with the random
            numbers of the forward.
        takes_positions: Whether all dimensions before the features are alike, so that rows of one example may be positions.
        later_dims: The dimensions that hold the examples in outputs after the first; those beyond have them as the first.
        prepare: Turns the arguments of a call into the rule's inputs, where a layer takes them in several forms.
        cases: Layers and inputs for the contract tests: how to build a layer, and the shape of its input or a function that
            draws its inputs.
    """

    contributions: Contributions
    parameters: tuple[str, ...]
    input_dims: int | Callable[[Any], int]
    example_dims: ExampleDims | Callable[[Any, Inputs], ExampleDims]
    applies: Callable[[Any], bool]
    repeats_noise: Callable[[Any], bool]
    takes_positions: bool
    by_hooks: bool
    cases: Sequence[Case]
    later_dims: tuple[int, ...] = ()
    prepare: Callable[[Any, Inputs], Inputs] = _as_they_are
    _fast_sums: Callable[..., Sums] | None = None
    _saved: Callable[[Any, Any], Any] | None = None

    def fast_sums(self, function: Callable[..., Sums]) -> Callable[..., Sums]:
        """Register the decorated ``(layer, inputs, grad_output, workspace) → Sums``."""
        self._fast_sums = function
        return function

    def saved_from_forward(self, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Register the decorated ``(layer, output)``; `fast_sums` gets its result as ``saved`` unless it is None."""
        self._saved = function
        return function

    def __call__(self, layer: nn.Module, inputs: Inputs, grad_output: Any) -> PerExample:
        """Every example's contribution to the gradient of every parameter of `layer`."""
        if not self.num_examples(layer, inputs):
            return {name: p.new_zeros(0, *p.shape) for name, p in layer.named_parameters()}
        return self.contributions(layer, inputs, grad_output)

    def sums(self, layer: nn.Module, inputs: Inputs, grad_output: Any, workspace: Workspace, saved: Any = None) -> Sums:
        """Σ_i c_i and Σ_i c_i² of every parameter of `layer`."""
        if not self.num_examples(layer, inputs):
            return {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in layer.named_parameters()}
        if self._fast_sums is None:
            return self.sums_in_parts(layer, inputs, grad_output, workspace)
        extra = () if saved is None else (saved,)
        return self._fast_sums(layer, inputs, grad_output, workspace, *extra)

    def sums_in_parts(self, layer: nn.Module, inputs: Inputs, grad_output: Any, workspace: Workspace) -> Sums:
        """Σ_i c_i and Σ_i c_i² from contributions, of as many examples at a time as fit the workspace."""
        size = workspace.examples_at_once(sum(p.numel() for p in layer.parameters()))
        total: Sums = {}
        for start in range(0, self.num_examples(layer, inputs), size):
            some, gradient = self.select(layer, inputs, grad_output, start, size)
            for name, part in self.contributions(layer, some, gradient).items():
                add_sums(total, name, part)
        return total

    def saved(self, layer: nn.Module, output: Any) -> Any:
        """The part of a forward that `fast_sums` reuses; None for nothing."""
        return None if self._saved is None else self._saved(layer, output)

    def bind(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """The arguments of a call in the order of the forward's signature, with defaults filled in."""
        signature, defaults = _signature(type(layer).forward)
        if not kwargs and inspect.Parameter.empty not in defaults[len(args) :]:
            return (*args, *defaults[len(args) :])
        bound = signature.bind(layer, *args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments.values())[1:]

    def dims(self, layer: nn.Module, inputs: Inputs) -> ExampleDims:
        """The dimension of each input that holds the examples, None for an input that all examples share."""
        known = self.example_dims if isinstance(self.example_dims, tuple) else self.example_dims(layer, inputs)
        return (*known[: len(inputs)], *(None for _ in inputs[len(known) :]))

    def num_examples(self, layer: nn.Module, inputs: Inputs) -> int:
        """Number of examples, read from the first input."""
        size: int = inputs[0].shape[self.dims(layer, inputs)[0] or 0]
        return size

    def least_dims(self, layer: nn.Module) -> int:
        """Least number of dimensions of a first input that holds examples; with fewer it is one example alone."""
        return self.input_dims if isinstance(self.input_dims, int) else self.input_dims(layer)

    def select(self, layer: nn.Module, inputs: Inputs, grad_output: Any, start: int, count: int) -> tuple[Inputs, Any]:
        """Inputs and output gradients of `count` examples from `start` on; outputs hold them as the first input does."""
        dims, stop = self.dims(layer, inputs), start + count
        some = (_narrowed(value, dim, start, stop) for value, dim in zip(inputs, dims, strict=True))
        if isinstance(grad_output, tuple):
            return tuple(some), tuple(_narrowed(grad, dims[0], start, stop) for grad in grad_output)
        return tuple(some), _narrowed(grad_output, dims[0], start, stop)


_RULES: dict[type[nn.Module] | str, LayerRule] = {}


def layer_rule(
    *layers: type[nn.Module] | str,
    parameters: tuple[str, ...],
    input_dims: int | Callable[[Any], int] = 2,
    example_dims: ExampleDims | Callable[[Any, Inputs], ExampleDims] = (0,),
    applies: Callable[[Any], bool] = lambda layer: True,
    repeats_noise: Callable[[Any], bool] = lambda layer: False,
    takes_positions: bool = False,
    by_hooks: bool = True,
    later_dims: tuple[int, ...] = (),
    prepare: Callable[[Any, Inputs], Inputs] = _as_they_are,
    cases: Sequence[Case] = (),
) -> Callable[[Contributions], LayerRule]:
    """Register the decorated function as the rule of `layers`.

    Args:
        layers: Layer types, or their qualified names, for libraries that need not be installed.
        parameters: Names of all parameters that such a layer may hold; see `LayerRule` for this and the rest.
        input_dims: Least number of dimensions of an input that holds examples.
        example_dims: The dimensions that hold the examples.
        applies: Whether the rule holds for a layer.
        repeats_noise: Whether the rule draws the forward's noise again.
        takes_positions: Whether all dimensions before the features are alike.
        by_hooks: Whether a backward hook sees all gradients.
        later_dims: The dimensions that hold the examples in outputs after the first.
        prepare: Turns the arguments of a call into the rule's inputs.
        cases: Examples for the contract tests.

    Returns:
        The decorator, which returns the rule.
    """

    def register(function: Contributions) -> LayerRule:
        about = (applies, repeats_noise, takes_positions, by_hooks)
        rule = LayerRule(function, parameters, input_dims, example_dims, *about, cases, later_dims, prepare)
        rule.__doc__ = function.__doc__
        _RULES.update(dict.fromkeys(layers, rule))
        return rule

    return register


def registered_rules() -> dict[type[nn.Module] | str, LayerRule]:
    """Every rule by its layer type or the type's qualified name."""
    return dict(_RULES)


def rule_for(layer: nn.Module) -> LayerRule | None:
    """The rule that holds for `layer`, or None if only the generic rule does.

    A subclass inherits a rule only if it computes what its parent computes: same forward, same parameters (a parametrised
    layer has others).

    Args:
        layer: Any module.

    Returns:
        The rule, or None.
    """
    ancestor: Any
    for ancestor in type(layer).__mro__:
        rule = _RULES.get(ancestor) or _RULES.get(f"{ancestor.__module__}.{ancestor.__qualname__}")
        if rule is not None:
            same = computes(layer, ancestor.forward) and _holds(layer, rule.parameters)
            return rule if same and rule.applies(layer) else None
    return None


def computes(layer: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a call of `layer` is a call of `forward`; a copy of a layer may hold it as an attribute of its own."""
    method: Any = layer.forward
    return getattr(method, "__func__", None) is forward and method.__self__ is layer


def draws(*shapes: tuple[int, ...]) -> Callable[[Generator], Inputs]:
    """Inputs for `cases`: normal numbers in float64, one tensor for each shape."""
    return lambda generator: tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)


def add_sums(total: Sums, name: str, part: Tensor) -> None:
    """Add the per-example contributions `part` [B, *shape] to `total[name]`; overwrites `part`."""
    grad = part.sum(0)
    square = part.square_().sum(0)  # in place: allocating a second buffer costs more than the arithmetic
    if name in total:
        grad, square = total[name][0].add_(grad), total[name][1].add_(square)
    total[name] = (grad, square)


def _holds(layer: nn.Module, parameters: tuple[str, ...]) -> bool:
    """Whether all parameters of `layer` and of its children are among `parameters`, and the first of them is its own."""
    if parameters[0] not in own_parameters(layer):
        return False
    if not has_children(layer):
        return all(name in parameters for name, param in own_parameters(layer).items() if param is not None)
    return all(name in parameters for name, _ in layer.named_parameters(remove_duplicate=False))


@lru_cache(maxsize=256)
def _signature(forward: Callable[..., Any]) -> tuple[inspect.Signature, tuple[Any, ...]]:
    """The forward's signature, and the default of each argument behind ``self``."""
    signature = inspect.signature(forward)
    return signature, tuple(parameter.default for parameter in list(signature.parameters.values())[1:])


def _narrowed(value: Any, dim: int | None, start: int, stop: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_narrowed(each, dim, start, stop) for each in value)
    if dim is None or not isinstance(value, Tensor):
        return value
    stop = min(stop, value.shape[dim])
    return value.narrow(dim, start, stop - start)
