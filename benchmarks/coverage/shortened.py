"""Deep models, shortened: of equal blocks in a row two stay, which hold the same layers as all of them."""

from __future__ import annotations

from itertools import groupby

from torch import nn

KEPT = 2  # blocks that alternate, as Swin's shifted windows do, both stay


def shorten(model: nn.Module) -> int:
    """Remove all but the first two of successive equal blocks, in place; returns the number of removed blocks."""
    return sum(
        _shorten_one(module) for module in list(model.modules()) if isinstance(module, (nn.Sequential, nn.ModuleList))
    )


def _shorten_one(blocks: nn.Sequential | nn.ModuleList) -> int:
    runs = [list(run) for _, run in groupby(blocks._modules.items(), key=lambda named: repr(named[1]))]
    kept = [named for run in runs for named in (run[:KEPT] if _has_parameters(run[0][1]) else run)]
    removed = len(blocks) - len(kept)
    if removed:
        names = [name for name, _ in kept] if isinstance(blocks, nn.Sequential) else map(str, range(len(kept)))
        blocks._modules = dict(zip(names, (block for _, block in kept), strict=True))
    return removed


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
