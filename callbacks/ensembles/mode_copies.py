"""Copies of a network at the ends of the cycles of a fit, named as after the fit (`callbacks.trainer.masks`)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.trainer.masks import multiplied, split
from lightning_bayes.optim.readout import constants_of
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive import MemberSamples
from lightning_bayes.private_torch import ORIGINAL

Mode: TypeAlias = dict[str, Tensor]  # parameters and buffers by name


def copied(module: LightningModule, previous: Mode) -> Mode:
    """The tensors of a module, on the CPU; those that equal the previous copy's are shared with it."""
    values = multiplied({name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)})
    copies = {name: value.detach().to("cpu", copy=True) for name, value in values.items()}
    return {
        name: previous[name] if name in previous and torch.equal(value, previous[name]) else value
        for name, value in copies.items()
    }


def held_by(module: LightningModule, mode: Mode) -> Mode:
    """The tensors of a mode as the module holds them now."""
    return split(mode, module.state_dict())


def members(module: LightningModule, modes: list[Mode]) -> MemberSamples:
    """The modes on the device of the module."""
    return MemberSamples(
        [{name: value.to(module.device) for name, value in held_by(module, mode).items()} for mode in modes]
    )


def distance(module: LightningModule, modes: list[Mode]) -> float:
    """The mean over successive modes of ‖θ - θ'‖ / ‖θ‖, over the trained parameters."""
    names = {name for name, param in module.named_parameters() if param.requires_grad}
    shared = [name for name in modes[-1] if name in names or name + ORIGINAL in names]
    flat = [torch.cat([mode[name].flatten().double() for name in shared]) for mode in modes]
    return sum(float((b - a).norm() / b.norm()) for a, b in itertools.pairwise(flat)) / (len(flat) - 1)


def at_mode(callback: VariationalCallback, mode: Mode) -> AbstractPosterior:
    """The posterior around a mode, with the constants of its copy."""
    assert callback.optimizer is not None  # it made the updates of this fit
    posterior = callback.optimizer.posterior().to("cpu")
    return with_constants(posterior, mode)


def with_constants(posterior: Any, mode: Mode) -> AbstractPosterior:
    """A copy of a posterior, which is a dataclass, with the constants of a mode; masks stay those of the module."""
    rest = {name: value for name, value in mode.items() if name + ORIGINAL not in posterior.mean}
    changed: AbstractPosterior = replace(posterior, constants=constants_of(rest, posterior.mean))
    return changed.with_likelihood(posterior.likelihood)
