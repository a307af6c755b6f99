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
