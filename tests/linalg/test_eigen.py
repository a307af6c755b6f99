"""Eigendecomposition of symmetric matrices, also where single precision does not converge."""

from __future__ import annotations

import pytest
import torch

from lightning_bayes.errors import NonFiniteError
from lightning_bayes.linalg import symmetric_eigen


def low_rank(generator, size=30, rank=4):
    root = torch.randn(size, rank, generator=generator)
    return root @ root.mT


def with_zeros(generator):
    matrix = low_rank(generator)
    matrix[[0, 7, 29]] = matrix[:, [0, 7, 29]] = 0
    return matrix


def fails_in(dtypes, monkeypatch):
    exact = torch.linalg.eigh

    def fails(matrix):
        if matrix.dtype in dtypes:
            raise torch.linalg.LinAlgError("The algorithm failed to converge")
        return exact(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", fails)


@pytest.mark.parametrize("failing", [(), (torch.float32,), (torch.float32, torch.float64)], ids=len)
@pytest.mark.parametrize(
    "make",
    [low_rank, with_zeros, lambda g: torch.stack([low_rank(g), with_zeros(g)])],
    ids=["low rank", "zeros", "batch"],
)
def test_values_and_vectors_give_the_matrix(failing, make, generator, monkeypatch):
    fails_in(failing, monkeypatch)
    matrix = make(generator)
    values, vectors = symmetric_eigen(matrix)
    assert values.dtype == vectors.dtype == torch.float32
    assert (values >= 0).all()
    assert (values.diff() >= 0).all()
    torch.testing.assert_close(vectors * values[..., None, :] @ vectors.mT, matrix, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        vectors.mT @ vectors, torch.eye(matrix.shape[-1]).expand_as(matrix), rtol=1e-5, atol=1e-5
    )


def test_zeros_have_the_unit_vectors():
    values, vectors = symmetric_eigen(torch.zeros(3, 3))
    assert values.tolist() == [0, 0, 0]
    torch.testing.assert_close(vectors, torch.eye(3))


def test_entries_that_are_not_finite_are_counted():
    with pytest.raises(NonFiniteError, match=r"The factor \[2, 2\] has 1 non-finite entries"):
        symmetric_eigen(torch.tensor([[1.0, 0.0], [0.0, torch.inf]]), "factor")
