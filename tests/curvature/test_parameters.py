"""Rows of a model's parameters that get no gradient by construction."""

from __future__ import annotations

import torch
from torch import nn

from lightning_bayes.curvature import rows_without_gradient


def test_only_padding_rows_of_tables_that_nobody_shares_get_no_gradient():
    tied, out = nn.Embedding(5, 3, padding_idx=1), nn.Linear(3, 5, bias=False)
    out.weight = tied.weight
    model = nn.ModuleList(
        [nn.Embedding(4, 2), nn.Embedding(4, 2, padding_idx=3), nn.EmbeddingBag(3, 2, padding_idx=0), tied, out]
    )
    rows = rows_without_gradient(model)
    assert {param: mask.tolist() for param, mask in rows.items()} == {
        model[1].weight: [False, False, False, True],
        model[2].weight: [True, False, False],
    }
    model[1](torch.tensor([0, 3, 3])).sum().backward()
    assert not model[1].weight.grad[rows[model[1].weight]].any()


def test_the_padding_row_of_one_vocabulary_for_two_languages_gets_no_gradient():
    source, target, other = (nn.Embedding(5, 3, padding_idx=index) for index in (1, 1, 2))
    target.weight = source.weight
    model = nn.ModuleList([source, target])
    (mask,) = rows_without_gradient(model).values()
    assert mask.tolist() == [False, True, False, False, False]
    (source(torch.arange(5)) * target(torch.arange(5))).sum().backward()
    assert not source.weight.grad[mask].any()
    other.weight = source.weight
    assert not rows_without_gradient(model.append(other))
