"""Building the network of a posterior file again: by `create_model`, or by a class or function that the file names.

A file from elsewhere could name any function, so nothing that it names is imported unless the caller allows its package.
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

_PLACE: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def origin_of(model: nn.Module, factory: str | None, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """How to build a model again, as plain values.

    Args:
        model: The model.
        factory: ``"package.module:function"``, which returns such a model. None: `create_model`, if it built the model; else
            the model's class, whose arguments are a LightningModule's ``hparams``.
        arguments: Keyword arguments of the factory; None takes the ``hparams``.

    Returns:
        ``name`` and ``arguments`` of `create_model`, or ``factory`` and ``arguments``; arguments of None are not known.

    Raises:
        HyperparameterError: If the factory has another form, or arguments stand alone.
    """
    built = known_architecture(model)
    if factory is None and built is not None:
        return {"name": built.name, "arguments": built.arguments}
    if factory is not None and not _PLACE.fullmatch(factory):
        raise HyperparameterError(f"factory={factory!r} must be the place of a function, 'package.module:function'.")
    if factory is None and arguments is not None:
        raise HyperparameterError("arguments belong to a factory. Pass factory='package.module:function' as well.")
    place = factory or f"{type(model).__module__}:{type(model).__qualname__}"
    known = arguments if factory is not None else _hyperparameters(model)
    return {"factory": place, "arguments": None if known is None else dict(known)}


def _hyperparameters(model: nn.Module) -> dict[str, Any] | None:
    """Those that ``save_hyperparameters`` has stored; none are needed where the class has no arguments."""
    stored = getattr(model, "hparams", None)
    if stored:
        return dict(stored)
    is_local = "<locals>" in type(model).__qualname__
    return None if is_local or inspect.signature(type(model)).parameters else {}


def rebuilt(origin: Mapping[str, Any], model: nn.Module | None, allow: str | Sequence[str], source: str) -> nn.Module:
    """Build the model of a file.

    Args:
        origin: As from `origin_of`.
        model: A model to use in the place of another one; None builds one.
        allow: Packages whose functions may be called.
        source: The file, for messages.

    Returns:
        The model.

    Raises:
        PosteriorError: If the model cannot be built, or only by code that is not allowed.
    """
    if model is not None:
        return model
    if "factory" not in origin:
        built = Architecture(**origin)
        return create_model(built.name, **built.arguments)
    place, arguments = str(origin["factory"]), origin["arguments"]
    module, _, name = place.partition(":")
    given = "Build the network yourself and pass it: load(path, model=...)."
    if arguments is None:
        raise PosteriorError(f"{source} holds weights of {place} without the arguments that it was built with. {given}")
    packages = (allow,) if isinstance(allow, str) else tuple(allow)
    if not any(module == package or module.startswith(f"{package}.") for package in packages):
        raise PosteriorError(
            f"{source} is built by {place}, which is code of another package. If you trust it, allow it: "
            f"load(path, allow={module.partition('.')[0]!r}). {given}"
        )
    return _called(module, name, arguments, f"{source}: {place}", given)


def _called(module: str, name: str, arguments: Mapping[str, Any], place: str, given: str) -> nn.Module:
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        model = found(**arguments)
    except Exception as error:  # foreign code fails in any way
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise PosteriorError(f"{place} did not build the network ({reason}). {given}") from error
    if not isinstance(model, nn.Module):
        raise PosteriorError(f"{place} returned a {type(model).__name__}, not a network. {given}")
    return model
