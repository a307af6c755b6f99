"""Eigendecomposition of symmetric matrices, also where single precision does not converge."""

from __future__ import annotations

import pytest
import torch

from lightning_bayes.errors import NonFiniteError
from lightning_bayes.linalg import symmetric_eigen


def low_rank(generator, size=30, rank=4):
    root = torch.randn(size, rank, generator=generator)
    return root @ root.mT


@pytest.mark.parametrize("converges", [True, False])
def test_values_and_vectors_give_the_matrix(converges, generator, monkeypatch):
    exact = torch.linalg.eigh

    def single_precision_fails(matrix):
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("The algorithm failed to converge")
        return exact(matrix)

    if not converges:
        monkeypatch.setattr(torch.linalg, "eigh", single_precision_fails)
    matrix = low_rank(generator)
    values, vectors = symmetric_eigen(matrix)
    assert values.dtype == vectors.dtype == torch.float32
    assert (values >= 0).all()
    torch.testing.assert_close(vectors * values @ vectors.mT, matrix, rtol=1e-4, atol=1e-4)


def test_entries_that_are_not_finite_are_counted():
    with pytest.raises(NonFiniteError, match=r"The factor \[2, 2\] has 1 entries"):
        symmetric_eigen(torch.tensor([[1.0, 0.0], [0.0, torch.inf]]), "factor")
