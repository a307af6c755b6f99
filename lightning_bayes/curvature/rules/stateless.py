"""Calling a module with replaced parameters and buffers, which are restored afterwards.

`torch.func.functional_call` loses tensors of a submodule that is registered under two names, so it is not used here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_bayes.private_torch import CALL_HOOKS, FLAT_WEIGHTS, PRE_HOOKS, own_buffers, own_parameters


def call_with(module: nn.Module, tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `module` with replaced parameters and buffers, without its hooks, which the original call has run."""
    named: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    replacements = {original: tensors[name] for name, original in named if name in tensors}
    with replaced(module, replacements), _only_weight_hooks(module):
        return module(*args, **kwargs)


@contextmanager
def replaced(module: nn.Module, replacements: dict[Tensor, Tensor]) -> Iterator[None]:
    """Replace parameters and buffers, shared ones under all names; restore the originals on exit."""
    parts = list(module.modules())
    registries: list[dict[str, Any]] = [
        registry for part in parts for registry in (own_parameters(part), own_buffers(part)) if registry
    ]
    originals = [
        (registry, name, tensor)
        for registry in registries
        for name, tensor in registry.items()
        if tensor in replacements
    ]
    recurrent_weights = [(part, _flat_weights(part)) for part in parts if isinstance(part, nn.RNNBase)]
    try:
        for registry, name, tensor in originals:
            registry[name] = replacements[tensor]
        yield
    finally:
        for registry, name, tensor in originals:
            registry[name] = tensor
        for part, weights in recurrent_weights:
            vars(part).update(weights)


@contextmanager
def without_trace(module: nn.Module) -> Iterator[None]:
    """Restore all attributes of the module and its submodules on exit, so that a call leaves no trace."""
    before = [(part, dict(vars(part))) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)


@contextmanager
def _only_weight_hooks(module: nn.Module) -> Iterator[None]:
    """Disable the module's hooks, except for side effects of pre-hooks: old-style weight_norm computes the weight there."""
    hooks_by_kind = {name: hooks for name, hooks in vars(module).items() if name in CALL_HOOKS}
    try:
        vars(module).update({name: type(hooks)() for name, hooks in hooks_by_kind.items()})
        vars(module)[PRE_HOOKS].update({k: _without_result(hook) for k, hook in hooks_by_kind[PRE_HOOKS].items()})
        yield
    finally:
        vars(module).update(hooks_by_kind)


def _without_result(hook: Callable[..., Any]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        hook(*args)  # the original call has already applied the hook's change of the input

    return run


def _flat_weights(layer: nn.Module) -> dict[str, Any]:
    """A recurrent layer's own lists of its parameters, which a call with other parameters changes."""
    return {name: value for name, value in vars(layer).items() if name in FLAT_WEIGHTS}
