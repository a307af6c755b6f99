"""Shorten deep models: keep two of successive equal blocks, which contain the same layers as all of them."""

from __future__ import annotations

from itertools import groupby

from torch import nn

KEPT = 2  # keeps both kinds of alternating blocks, such as Swin's shifted windows


def shorten(model: nn.Module) -> int:
    """Remove all but the first two of successive equal blocks, in place; returns the number of removed blocks."""
    return sum(
        _shorten_one(module) for module in list(model.modules()) if isinstance(module, (nn.Sequential, nn.ModuleList))
    )


def _shorten_one(blocks: nn.Sequential | nn.ModuleList) -> int:
    runs = [list(run) for _, run in groupby(blocks._modules.items(), key=lambda named: repr(named[1]))]
    remaining = [named for run in runs for named in (run[:KEPT] if _has_parameters(run[0][1]) else run)]
    removed = len(blocks) - len(remaining)
    if removed:
        names = (
            [name for name, _ in remaining] if isinstance(blocks, nn.Sequential) else map(str, range(len(remaining)))
        )
        blocks._modules = dict(zip(names, (block for _, block in remaining), strict=True))
    return removed


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
