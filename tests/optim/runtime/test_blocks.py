"""Blocks: every element once, in order, whatever the sizes and memory layouts."""

from __future__ import annotations

import pytest
import torch

from lightning_bayes.optim.runtime import blocks as module
from lightning_bayes.optim.runtime.blocks import blocks

SIZES = [
    [(3,), (2, 2), ()],  # all in one block
    [(10,)],  # one tensor in parts
    [(3,), (17,), (1,), (4,), (1,), (9,), (2,)],  # small ones round large ones
    [(4,), (4,), (4,)],  # full blocks
    [(0,), (3,), (0,)],  # empty tensors
]


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request, monkeypatch):
    """Small blocks, of at most eight elements for each thread."""
    monkeypatch.setattr(module, "CACHED_ELEMENTS", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return request.param


def numbered(shapes):
    numbers = iter(range(1000))
    tensors = [torch.tensor([next(numbers) for _ in range(torch.Size(s).numel())]) for s in shapes]
    return [t.reshape(s).double() for t, s in zip(tensors, shapes, strict=True)]


@pytest.mark.parametrize("shapes", SIZES)
def test_blocks_cover_every_element_once_and_in_order(shapes, threads):
    tensors = numbered(shapes)
    parts = [block.join(tensors) for block in blocks(tensors)]
    assert torch.equal(torch.cat(parts), torch.cat([t.reshape(-1) for t in tensors]))
    assert max(len(part) for part in parts) <= 8 * threads


@pytest.mark.parametrize("shapes", SIZES)
def test_what_is_written_is_read_again(shapes):
    tensors = numbered(shapes)
    targets = [torch.full_like(t, -1) for t in tensors]
    for block in blocks(tensors):
        block.write_(targets, block.join(tensors))
    assert all(torch.equal(a, b) for a, b in zip(tensors, targets, strict=True))


@pytest.mark.parametrize("shapes", SIZES)
def test_what_is_changed_in_place_is_written(shapes):
    """Whether `join` gave a view or a copy."""
    tensors, targets = numbered(shapes), numbered(shapes)
    for block in blocks(targets):
        block.write_(targets, block.join(targets).mul_(2))
    assert all(torch.equal(2 * a, b) for a, b in zip(tensors, targets, strict=True))


def test_other_memory_layouts_keep_their_layout():
    tensors = [t.permute(1, 0) for t in numbered([(3, 4), (2, 2)])]
    targets = [torch.zeros_like(t) for t in tensors]
    for block in blocks(tensors):
        block.write_(targets, 2 * block.join(tensors))
    assert all(torch.equal(2 * a, b) and a.stride() == b.stride() for a, b in zip(tensors, targets, strict=True))
