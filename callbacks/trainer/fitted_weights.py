"""The network to which the stored networks of a callback belong."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import final

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn


@final
class FittedWeights:
    """The parameters at the end of the last fit, or in the checkpoint that was loaded last, as a checksum."""

    def __init__(self) -> None:
        self._checksum: int | None = None
        self._is_loaded = False
        self.is_of_fit = False  # which ended in this process

    @property
    def is_kept(self) -> bool:
        """Whether a fit has ended, or a checkpoint was loaded."""
        return self._checksum is not None or self._is_loaded

    def forget(self) -> None:
        """No fit has ended, and no checkpoint was loaded."""
        self._checksum, self._is_loaded, self.is_of_fit = None, False, False

    def keep(self, module: LightningModule) -> None:
        """The fit of this module has ended."""
        self._checksum, self._is_loaded, self.is_of_fit = _of_module(module), False, True

    def loaded(self) -> None:
        """A checkpoint was loaded into the module that is evaluated next, which may convert its precision."""
        self._is_loaded, self.is_of_fit = True, False

    def are_those_of(self, module: LightningModule, callback: str) -> bool:
        """Whether the module has these parameters; warns if not."""
        if self._is_loaded:
            self._checksum, self._is_loaded = _of_module(module), False
        if self._checksum == _of_module(module):
            return True
        rank_zero_warn(
            f"{callback} evaluates at the module's current weights, which are not those of its last fit. Pass ckpt_path=... "
            "from the module's own fit."
        )
        return False


def _of_module(module: LightningModule) -> int:
    return checksum({name: param for name, param in module.named_parameters() if type(param) is nn.Parameter})


def checksum(weights: Mapping[str, object]) -> int:
    """A checksum of the names and bits of the tensors among `weights`."""
    found = 0
    for name, value in weights.items():
        if isinstance(value, Tensor):
            found = zlib.crc32(name.encode(), found)
            found = zlib.crc32(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, found)
    return found
