"""Calling a module with other parameters and buffers; the module gets its own back, under whatever names it holds them.

`torch.func.functional_call` loses tensors of a submodule that is registered under two names, so this does not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_bayes.private_torch import CALL_HOOKS, FLAT_WEIGHTS, PRE_HOOKS, own_buffers, own_parameters


def call_with(module: nn.Module, tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `module` with other parameters and buffers, without its hooks: whoever called it first has run them.

    Args:
        module: The module.
        tensors: Parameters and buffers by name; the others stay.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The module's output.
    """
    with replaced(module, tensors), _only_weight_hooks(module):
        return module(*args, **kwargs)


@contextmanager
def replaced(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Put `tensors` in the place of the parameters and buffers of these names, and the module's own back on exit.

    Args:
        module: The module.
        tensors: Parameters and buffers by name; a tensor that has several names is replaced under each.

    Yields:
        Nothing.
    """
    named: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    new = {own: tensors[name] for name, own in named if name in tensors}
    holders: list[dict[str, Any]] = [
        slots for part in module.modules() for slots in (own_parameters(part), own_buffers(part)) if slots
    ]
    own = [(slots, name, value) for slots in holders for name, value in slots.items() if value in new]
    lists = [(part, flat_weights(part)) for part in module.modules() if isinstance(part, nn.RNNBase)]
    try:
        for slots, name, value in own:
            slots[name] = new[value]
        yield
    finally:
        for slots, name, value in own:
            slots[name] = value
        for part, flat in lists:
            vars(part).update(flat)


@contextmanager
def without_trace(module: nn.Module) -> Iterator[None]:
    """Give the module and its submodules back every attribute that they had, whatever a call assigns to them."""
    before = [(part, dict(vars(part))) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)


@contextmanager
def _only_weight_hooks(module: nn.Module) -> Iterator[None]:
    """Silence the module's own hooks, except for its pre-hooks' work: old-style weight_norm computes the weight there."""
    own = {name: hooks for name, hooks in vars(module).items() if name in CALL_HOOKS}
    try:
        vars(module).update({name: type(hooks)() for name, hooks in own.items()})
        vars(module)[PRE_HOOKS].update({k: _without_result(hook) for k, hook in own[PRE_HOOKS].items()})
        yield
    finally:
        vars(module).update(own)


def _without_result(hook: Callable[..., Any]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        hook(*args)  # a changed input was changed already, when the owner called the module

    return run


def flat_weights(layer: nn.Module) -> dict[str, Any]:
    """The lists in which a recurrent layer holds its parameters again; a call with other ones changes them."""
    return {name: value for name, value in vars(layer).items() if name in FLAT_WEIGHTS}
