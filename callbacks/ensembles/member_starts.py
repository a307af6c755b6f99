"""Where the members of an ensemble start: the module before its fit, copied or built anew, with weights drawn anew."""

from __future__ import annotations

import copy
import inspect
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_bayes.errors import UnsupportedLayerError, UnsupportedTrainingError, name_some
from lightning_bayes.predictive import misfits
from lightning_bayes.private_torch import ATTENTION_RESET, COMPUTED_FROM


def copies_of(trainer: Trainer, module: LightningModule) -> Callable[[], LightningModule]:
    """A function that returns a copy of the module as it is now, or builds it anew from its ``hyper_parameters``."""
    try:
        untouched = copy.deepcopy(module)
    except Exception as error:  # of a lock, an open file, a weight that is computed: whatever the module holds
        return _rebuilds_of(trainer, module, error)
    return lambda: copy.deepcopy(untouched)


def _rebuilds_of(trainer: Trainer, module: LightningModule, reason: Exception) -> Callable[[], LightningModule]:
    """A function that builds the module anew, as `load_from_checkpoint` does, and loads its weights of now."""
    name = type(module).__name__
    try:
        saved = _saved(trainer, module)
        trainable = {param: value.requires_grad for param, value in module.named_parameters()}

        def build() -> LightningModule:
            options: dict[str, Any] = {"weights_only": False} if _takes_weights_only(module) else {}
            with isolate_rng():
                built = type(module).load_from_checkpoint(io.BytesIO(saved), map_location="cpu", **options)
            for param, value in built.named_parameters():
                value.requires_grad_(trainable[param])
            return built.train()

        mismatch = misfits(build(), module.state_dict())
    except Exception as error:
        mismatch = f"{type(error).__name__}: {error}"
    if mismatch:
        raise UnsupportedTrainingError(
            f"{name} cannot be copied ({type(reason).__name__}: {reason}), nor built anew from its hyper_parameters "
            f"({mismatch}). Call self.save_hyperparameters() in its constructor and build there what it holds; or train "
            "each member under a seed of its own, and pass the paths of their checkpoints as members=[...]."
        ) from reason
    rank_zero_info(
        f"DeepEnsembleCallback: {name} cannot be copied ({type(reason).__name__}: {reason}), so each member is built from "
        "the hyper_parameters that it has saved."
    )
    return build


def _saved(trainer: Trainer, module: LightningModule) -> bytes:
    """A checkpoint of the module, which holds the arguments of its constructor."""
    if not module.hparams and any(
        p.default is p.empty and p.kind not in {p.VAR_POSITIONAL, p.VAR_KEYWORD}
        for p in inspect.signature(type(module)).parameters.values()
    ):
        raise ValueError("it has saved none")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "start.ckpt"
        trainer.save_checkpoint(path, weights_only=True)
        return path.read_bytes()


def _takes_weights_only(module: LightningModule) -> bool:
    """Whether this Lightning has to be told that objects among the hyperparameters are the user's own."""
    return "weights_only" in inspect.signature(type(module).load_from_checkpoint).parameters


def layers_to_reset(module: nn.Module) -> list[Callable[[], None]]:
    """The `reset_parameters` of all layers with a trained parameter, children first; refuses random starts of no layer."""
    resets = {name: reset for name, layer in module.named_modules() if (reset := _reset_of(layer))}
    trained = [name for name, param in module.named_parameters() if param.requires_grad]
    params = dict(module.named_parameters())
    without = [name for name in trained if not any(owner in resets for owner in _owners(name))]
    stuck = [name for name in without if len(without) == len(trained) or not _is_constant(params[name])]
    stuck += [name for name in trained if name not in stuck and _computes(module, name)]
    if stuck:
        raise UnsupportedLayerError(
            f"{type(module).__name__} cannot start again from fresh weights: no layer with a method reset_parameters draws "
            f"{name_some(stuck)}. Define it, or train each member under a seed of its own and pass the paths of "
            "their checkpoints as members=[...]."
        )
    owners = {owner for name in trained for owner in _owners(name)}
    return [reset for name, reset in reversed(resets.items()) if name in owners]


def _is_constant(param: Tensor) -> bool:
    """Whether all entries are the same, as of a scale or an offset, which every member starts with."""
    return bool((param == param.flatten()[:1]).all())


def _computes(module: nn.Module, name: str) -> bool:
    """Whether a layer computes its weight from this parameter before each call, so that `reset_parameters` is undone."""
    owner, _, attribute = name.rpartition(".")
    held = vars(module.get_submodule(owner))
    return any(attribute.endswith(end) and attribute.removesuffix(end) in held for end in COMPUTED_FROM)


def _reset_of(layer: nn.Module) -> Callable[[], None] | None:
    name = ATTENTION_RESET if isinstance(layer, nn.MultiheadAttention) else "reset_parameters"
    reset = getattr(layer, name, None)
    if not callable(reset):
        return None
    return (lambda: _reset_parametrized(layer, reset)) if parametrize.is_parametrized(layer) else reset


def _reset_parametrized(layer: Any, reset: Callable[[], None]) -> None:
    """Draw the weights that are parametrized, and invert the parametrization, such as torch's ``weight_norm``."""
    with parametrize.cached():
        drawn = {name: getattr(layer, name) for name in layer.parametrizations}
        reset()
    for name, value in drawn.items():
        setattr(layer, name, value.clone())


def _owners(name: str) -> Iterator[str]:
    """The names of all modules around a parameter, the outermost of which is the empty name."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def draw_anew(module: nn.Module) -> None:
    """Draw the initial weights of all layers with a trained parameter anew."""
    with torch.no_grad():
        for reset in layers_to_reset(module):
            reset()
