"""All private symbols of Lightning that this package uses, and the Lightning versions that it was tested with.

Lightning may rename private symbols in any release. They are used only in this file and are checked before a fit. Other code
calls the functions below. A test finds uses of Lightning's private symbols outside of this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, NamedTuple, final

import torch
from lightning import __version__ as lightning_version
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.utilities import CombinedLoader

from lightning_bayes.callbacks.trainer.patches import Patches
from lightning_bayes.errors import UnsupportedTrainingError

OLDEST_TESTED: Final = "2.5.1"
NEWEST_TESTED: Final = "2.6.6"


class PrivateMethod(NamedTuple):
    """An undocumented method of Lightning."""

    owner: str  # path of the owning object, from the trainer
    name: str
    parameters: tuple[str, ...]  # without self

    def __str__(self) -> str:
        """Path and name."""
        return f"trainer.{self.owner}.{self.name}"


MAKE_CLOSURE: Final = PrivateMethod(
    "fit_loop.epoch_loop.automatic_optimization", "_make_closure", ("kwargs", "optimizer", "batch_idx")
)
SHOULD_ACCUMULATE: Final = PrivateMethod("fit_loop", "_should_accumulate", ())
METHODS: Final = (MAKE_CLOSURE, SHOULD_ACCUMULATE)
ATTRIBUTES: Final = (
    ("fit_loop", "_combined_loader"),
    ("fit_loop", "_data_source"),
    ("fit_loop.epoch_loop.val_loop", "_data_source"),
)
MODE: Final = "_mode"  # of `CombinedLoader`
CLOSURE_PARTS: Final = ("_step_fn", "_backward_fn", "_zero_grad_fn")  # of `Closure`, in the order of its arguments


class ClosureParts(NamedTuple):
    """What Lightning's training closure runs for one batch."""

    step: Callable[[], ClosureResult]
    backward: Callable[[torch.Tensor], Any] | None  # None if Lightning skips backward
    zero_grad: Callable[[], None] | None  # None for later micro-batches of an update
    arguments: dict[str, Any]  # of the training step, which `step` reads: each pass gets the batch as the first one did
    step_follows: bool  # whether the optimizer steps after this micro-batch, because accumulation is complete


def check_private_symbols(trainer: Trainer) -> None:
    """Require every symbol above to exist and every method to have the expected parameters."""
    problems = [f"{method} {problem}" for method in METHODS if (problem := _problem(trainer, method))]
    closure: Any = Closure(lambda: ClosureResult(None), None, None)
    missing = [(path, name) for path, name in ATTRIBUTES if not hasattr(attrgetter(path)(trainer), name)]
    problems += [f"trainer.{path}.{name} is missing" for path, name in missing]
    problems += [] if hasattr(CombinedLoader([]), MODE) else [f"CombinedLoader.{MODE} is missing"]
    problems += [f"Closure.{name} is missing" for name in CLOSURE_PARTS if not hasattr(closure, name)]
    if problems:
        raise UnsupportedTrainingError(
            f"Lightning {lightning_version} is not supported: {'; '.join(problems)}. Install lightning {OLDEST_TESTED} to "
            f"{NEWEST_TESTED} (tested)."
        )


def _problem(trainer: Trainer, method: PrivateMethod) -> str:
    bound_method = getattr(attrgetter(method.owner)(trainer), method.name, None)
    if bound_method is None:
        return "is missing"
    # With two callbacks, the second one sees the first one's replacement, which has the same signature.
    parameters = tuple(inspect.signature(bound_method).parameters)
    if parameters != method.parameters:
        return f"takes ({', '.join(parameters)}) in place of ({', '.join(method.parameters)})"
    return ""


@final
class _ClosureMaker:
    """Replacement of a loop's method that builds closures; a class, so that it can be copied with its trainer."""

    def __init__(self, make: Callable[..., Any], trainer: Trainer, wrap: Callable[[ClosureParts], Closure]) -> None:
        self._make, self._trainer, self._wrap = make, trainer, wrap

    def __call__(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Closure:
        closure, follows = self._make(kwargs, optimizer, batch_idx), not self._trainer.fit_loop._should_accumulate()
        return self._wrap(ClosureParts(closure._step_fn, closure._backward_fn, closure._zero_grad_fn, kwargs, follows))


def wrap_closures(trainer: Trainer, wrap: Callable[[ClosureParts], Closure], patches: Patches) -> None:
    """Pass every training closure that Lightning builds to `wrap`, which returns the closure to run instead."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    patches.set(loop, MAKE_CLOSURE.name, _ClosureMaker(loop._make_closure, trainer, wrap))


def data_of_fit(trainer: Trainer) -> dict[str, Any]:
    """What the user passed to `fit`: a data module, loaders, or nothing if the module has them."""
    training, validation = trainer.fit_loop._data_source, trainer.fit_loop.epoch_loop.val_loop._data_source
    if isinstance(training.instance, LightningDataModule):
        return {"datamodule": training.instance}
    sources = {"train_dataloaders": training, "val_dataloaders": validation}
    return {name: source.instance for name, source in sources.items() if not source.is_module()}


def training_batches(trainer: Trainer) -> CombinedLoader:
    """The training loaders of the current fit in the user's mode, with iterators of their own."""
    loader = trainer.fit_loop._combined_loader
    if loader is None:
        raise UnsupportedTrainingError("The fit has no training data yet.")
    return CombinedLoader(loader.iterables, loader._mode)
