"""How to rebuild the network of a posterior file: with `create_model`, or with a class or function named in the file.

A file from an untrusted source could name any function, so a function is imported only if the caller allows its package.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from torch import nn

from lightning_bayes.errors import HyperparameterError, PosteriorError
from lightning_bayes.zoo.create import Architecture, create_model, known_architecture

_FACTORY_PATH: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def origin_of(model: nn.Module, factory: str | None, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Describe how to rebuild a model: ``name`` and ``arguments`` of `create_model`, or ``factory`` and ``arguments``."""
    # Without a factory, it is the model's class, called with the hparams of a LightningModule.
    if factory is not None and not _FACTORY_PATH.fullmatch(factory):
        raise HyperparameterError(f"factory={factory!r} must have the form 'package.module:function'.")
    if factory is None and arguments is not None:
        raise HyperparameterError("arguments require a factory. Pass factory='package.module:function' as well.")
    if factory is None:
        built = known_architecture(model)
        if built is not None:
            return {"name": built.name, "arguments": built.arguments}
        factory = f"{type(model).__module__}:{type(model).__qualname__}"
        arguments = _constructor_arguments(model)
    return {"factory": factory, "arguments": None if arguments is None else dict(arguments)}


def _constructor_arguments(model: nn.Module) -> dict[str, Any] | None:
    """The arguments stored by ``save_hyperparameters``, or an empty dictionary if the class takes no arguments."""
    hparams = getattr(model, "hparams", None)
    if hparams:
        return dict(hparams)
    is_local = "<locals>" in type(model).__qualname__
    return None if is_local or inspect.signature(type(model)).parameters else {}


def rebuilt(origin: Mapping[str, Any], model: nn.Module | None, allow: str | Sequence[str], source: str) -> nn.Module:
    """The model that `origin_of` described, or `model` if given; code of packages that are not in `allow` is not run."""
    if model is not None:
        return model
    if "factory" not in origin:
        built = Architecture(**origin)
        return create_model(built.name, **built.arguments)
    path, arguments = str(origin["factory"]), origin["arguments"]
    module, _, name = path.partition(":")
    hint = "Build the network yourself and pass it: load(path, model=...)."
    if arguments is None:
        raise PosteriorError(f"{source} holds weights of {path} without its constructor arguments. {hint}")
    packages = (allow,) if isinstance(allow, str) else tuple(allow)
    if not any(module == package or module.startswith(f"{package}.") for package in packages):
        raise PosteriorError(
            f"{source} needs {path}, which is code outside this package, to build the network. If you trust this code, "
            f"allow it: load(path, allow={module.partition('.')[0]!r}). {hint}"
        )
    try:
        factory: Any = import_module(module)
        for part in name.split("."):
            factory = getattr(factory, part)
        network = factory(**arguments)
    except Exception as error:  # third-party code can raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise PosteriorError(f"{source}: {path} did not build the network ({reason}). {hint}") from error
    if not isinstance(network, nn.Module):
        raise PosteriorError(f"{source}: {path} returned a {type(network).__name__}, not a network. {hint}")
    return network
