"""Weights that a model has for a while: copied in place, and restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_bayes.curvature.checkpointing import in_checkpoint
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.private_torch import NormBase, outside_functorch, own_buffers, own_parameters


@contextmanager
def temporary_weights(model: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Context in which `model` has the given weights."""
    # With duplicates: a posterior's constants name tied weights by each of their names.
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    targets = {name: tensors[name] for name in weights}
    with outside_functorch():
        originals = {name: target.detach().clone() for name, target in targets.items()}
    try:
        _copy_all_(targets, weights)
        yield
    finally:
        _copy_all_(targets, originals)


def _copy_all_(targets: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    with outside_functorch(), torch.no_grad():
        for name, target in targets.items():
            target.copy_(values[name])
    torch.clear_autocast_cache()  # of the former weights in half precision


@contextmanager
def graph_kept(model: nn.Module) -> Iterator[None]:
    """Context in which layers read copies of their weights if gradients are computed.

    A graph that is recorded in it stays valid when `temporary_weights` restores the weights. Activation checkpointing, which
    would compute it again with the restored weights, raises an `UnsupportedTrainingError`.
    """
    if not torch.is_grad_enabled():
        yield
        return
    layers = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    held = [(module, dict(own_parameters(module)), dict(own_buffers(module))) for module in layers]
    copies = {param: param.clone() for param in model.parameters()}
    watched = register_module_forward_pre_hook(_refuse_checkpoint)
    try:
        for module, params, buffers in held:
            own_parameters(module).update({n: None if p is None else copies[p] for n, p in params.items()})  # type: ignore[misc]
            if isinstance(module, NormBase) and not module.training:
                own_buffers(module).update({n: None if b is None else b.clone() for n, b in buffers.items()})
        yield
    finally:
        watched.remove()
        for module, params, buffers in held:
            own_parameters(module).update(params)
            own_buffers(module).update(buffers)


def _refuse_checkpoint(layer: nn.Module, args: object) -> None:
    if own_parameters(layer) and in_checkpoint():
        raise UnsupportedTrainingError(
            f"An evaluation computes gradients through {type(layer).__name__} under activation checkpointing, which would "
            "compute it again in backward, when the weights of the sample are gone. Call torch.utils.checkpoint in training "
            "alone, if self.training, or evaluate under torch.no_grad()."
        )
