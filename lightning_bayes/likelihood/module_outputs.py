"""The outputs of the modules that a training step calls itself, and the arguments of its own module's ``forward``."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_bayes.likelihood.inputs import Arguments
from lightning_bayes.likelihood.paths import Path, leaves

_REDIRECTED: Final = "wrapped_forward"  # the name of ``forward`` while Lightning calls a step through it, as under DDP


class Leaf(NamedTuple):
    """A tensor of an output."""

    path: Path
    value: Tensor  # with its graph


class Uncopied(partial[Any]):
    """A hook on a module, bound to the arguments of a capture, that does nothing in a copy of the module."""

    def __reduce__(self) -> Any:
        return partial, (_ignore,)


def _ignore(*args: Any, **kwargs: Any) -> None:
    return


@final
class ModuleOutputs:
    """Notes the outputs of the outermost modules that a step calls; those of the module itself alone, if there are any.

    Attributes:
        arguments: Of the first call of the module itself; None without one.
        output: What that call returned.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._undo = module, ExitStack()
        self._open_calls = list[Arguments | None]()  # None for a step that Lightning calls through ``forward``
        self._own, self._inner = list[Leaf](), list[Leaf]()
        self.arguments: Arguments | None = None
        self.output: Any = None

    @property
    def leaves(self) -> list[Leaf]:
        """The tensors with gradients."""
        return self._own or self._inner

    @property
    def is_own(self) -> bool:
        """Whether the step calls the module itself."""
        return bool(self._own)

    def start(self) -> None:
        """Note outputs from now on."""
        for module in self._module.modules():
            if not isinstance(module, torch.jit.ScriptModule):  # which refuses hooks
                before = module.register_forward_pre_hook(Uncopied(self._open), with_kwargs=True)
                after = module.register_forward_hook(Uncopied(self._close), always_call=True)
                self._undo.callback(before.remove)
                self._undo.callback(after.remove)

    def stop(self) -> None:
        """Note outputs no longer, and forget them."""
        self._undo.close()
        self._own, self._inner, self._open_calls = [], [], []
        self.arguments = self.output = None

    def _open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_step = module is self._module and getattr(module.forward, "__name__", "") == _REDIRECTED
        self._open_calls.append(None if is_step else (args, kwargs))

    def _close(self, module: nn.Module, args: Any, output: Any) -> None:
        arguments = self._open_calls.pop() if self._open_calls else None
        if arguments is None:
            return
        is_own = module is self._module
        if is_own and self.arguments is None:
            self.arguments, self.output = arguments, output
        if is_own or not any(self._open_calls):
            tensors = [(path, leaf) for path, leaf in leaves(output) if isinstance(leaf, Tensor)]
            found = [Leaf(path, leaf) for path, leaf in tensors if leaf.dim() and leaf.grad_fn is not None]
            (self._own if is_own else self._inner).extend(found)
