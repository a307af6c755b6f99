"""Kronecker products, damping and Cholesky factors against dense linear algebra."""

from __future__ import annotations

import math

import pytest
import torch
from random_matrices import F64, normal, seeded, spd

from lightning_bayes.errors import NonFiniteError, NotPositiveDefiniteError, ShapeError
from lightning_bayes.linalg import KroneckerProduct, cholesky, inverse_root, pi_damped, pi_ratio
from lightning_bayes.linalg.factors import BLOCK, MAX_SOLVE_SIDE, matmul_upper, upper_matmul

SEEDS = range(4)
BATCHES = [(), (2,), (2, 3)]


def product(generator, *batch):
    return KroneckerProduct(spd(3, *batch, generator=generator), spd(4, *batch, generator=generator))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_dense_product_is_that_of_torch(seed):
    factors = product(seeded(seed))
    torch.testing.assert_close(factors.dense(), torch.kron(*factors))
    rectangular = KroneckerProduct(normal(2, 3, generator=seeded(seed)), normal(5, 4, generator=seeded(seed)))
    torch.testing.assert_close(rectangular.dense(), torch.kron(*rectangular))


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_factored_algebra_is_dense_algebra(seed, batch):
    generator = seeded(seed)
    factors, x = product(generator, *batch), normal(*batch, 3, 4, generator=generator)
    other, dense = product(generator, *batch), factors.dense()
    flat = (dense @ x.flatten(-2)[..., None])[..., 0]
    torch.testing.assert_close(factors.matvec(x).flatten(-2), flat)
    torch.testing.assert_close(factors.compose(other).dense(), dense @ other.dense())
    torch.testing.assert_close(factors.inverse().dense(), torch.linalg.inv(dense))
    torch.testing.assert_close(factors.log_det(), torch.logdet(dense))
    torch.testing.assert_close(factors.trace(), dense.diagonal(dim1=-2, dim2=-1).sum(-1))
    torch.testing.assert_close(factors.diagonal().flatten(-2), dense.diagonal(dim1=-2, dim2=-1))
    root = factors.inverse_root()
    torch.testing.assert_close(root.dense() @ root.dense().mT, torch.linalg.inv(dense))
    weights = x.square()
    scaled = dense * weights.flatten(-2)[..., None, :] @ dense.mT
    torch.testing.assert_close(factors.squared_rows(weights).flatten(-2), scaled.diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_transpose_of_a_rectangular_product_is_dense_transposition(seed):
    generator = seeded(seed)
    factors = KroneckerProduct(normal(2, 3, generator=generator), normal(5, 4, generator=generator))
    torch.testing.assert_close(factors.transpose().dense(), factors.dense().T)


@pytest.mark.parametrize("seed", SEEDS)
def test_pi_damping_by_hand(seed):
    """tr S / dim = s, tr A / dim = a: S gains √γ √(s/a), A gains √γ √(a/s)."""
    factors = product(seeded(seed), 2)
    s, a = (factor.diagonal(dim1=1, dim2=2).mean(1) for factor in factors)
    damped = pi_damped(factors, 0.09)
    for found, factor, gain in zip(damped, factors, (0.3 * (s / a).sqrt(), 0.3 * (a / s).sqrt()), strict=True):
        torch.testing.assert_close(found, factor + gain[:, None, None] * torch.eye(factor.shape[-1], dtype=F64))


@pytest.mark.parametrize("scale", [1e-3, 7.0])
def test_the_damped_product_does_not_depend_on_how_a_scale_is_split(scale):
    factors = product(seeded(0))
    split = KroneckerProduct(factors.left * scale, factors.right / scale)
    torch.testing.assert_close(pi_damped(split, 0.1).dense(), pi_damped(factors, 0.1).dense())


def test_pi_balances_the_excess_over_exact_damping():
    """(S + √γ/π) ⊗ (A + π√γ) - S ⊗ A - γ = √γ (π S ⊗ I + I ⊗ A / π), two terms of equal trace."""
    factors, ratio = product(seeded(1)), pi_ratio(product(seeded(1)))
    eyes = torch.eye(3, dtype=F64), torch.eye(4, dtype=F64)
    first, second = ratio * torch.kron(factors.left, eyes[1]), torch.kron(eyes[0], factors.right) / ratio
    torch.testing.assert_close(first.trace(), second.trace())
    excess = pi_damped(factors, 0.04).dense() - factors.dense() - 0.04 * torch.eye(12, dtype=F64)
    torch.testing.assert_close(excess, 0.2 * (first + second))


@pytest.mark.parametrize("dead", ["left", "right", "both"])
def test_a_dead_layer_is_damped_to_the_damping(dead):
    live = product(seeded(2))
    left = live.left if dead == "right" else torch.zeros_like(live.left)
    right = live.right if dead == "left" else torch.zeros_like(live.right)
    damped = pi_damped(KroneckerProduct(left, right), 0.01).dense()
    torch.testing.assert_close(damped, 0.01 * torch.eye(12, dtype=F64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_ladder_adds_the_first_rung_that_suffices_for_each_matrix_alone(dtype):
    good = spd(4, generator=seeded(0)).to(dtype)
    singular = torch.ones(4, 4, dtype=dtype) - 1e-5 * torch.eye(4, dtype=dtype)  # eigenvalue -1e-5: only 1e-4 helps
    factors = cholesky(torch.stack([good, singular]))
    assert torch.equal(factors[0], torch.linalg.cholesky(good))
    jittered = singular + 1e-4 * singular.diagonal().mean() * torch.eye(4, dtype=dtype)
    torch.testing.assert_close(factors[1], torch.linalg.cholesky(jittered))


@pytest.mark.parametrize("side", [1, 5, MAX_SOLVE_SIDE, 2 * MAX_SOLVE_SIDE + 45, 2 * BLOCK + 75])
def test_the_inverse_root_is_that_of_the_inverse(side):
    matrix = spd(side, 2, generator=seeded(0))
    root = inverse_root(matrix)
    assert torch.equal(root, root.triu())
    torch.testing.assert_close(root @ root.mT, torch.linalg.inv(matrix))


def test_the_inverse_root_of_an_ill_conditioned_matrix():
    """Eigenvalues from 1 to 1e8, in single precision: as close to the truth as a triangular solve."""
    vectors = torch.linalg.qr(normal(400, 400, generator=seeded(1)))[0]
    matrix = ((vectors * torch.logspace(0, 8, 400, dtype=F64)) @ vectors.T + torch.eye(400, dtype=F64)).float()
    factor, found = torch.linalg.cholesky(matrix), inverse_root(matrix)
    solved = torch.linalg.solve_triangular(factor.mT, torch.eye(400), upper=True)
    truth = torch.linalg.inv(factor.mT.double())
    errors = [(root - truth).norm() / truth.norm() for root in (found, solved)]
    assert errors[0] < 2 * errors[1] + 1e-6


def test_a_matrix_beyond_the_ladder_is_named_with_its_eigenvalues():
    message = (
        r"The factor S of layer 'fc1' \[2, 2\] has no Cholesky factor: its eigenvalues range from -1 to 3, "
        r"and adding 0\.0001 of its mean diagonal.*larger damping or prior_precision"
    )
    with pytest.raises(NotPositiveDefiniteError, match=message):
        cholesky(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), "factor S of layer 'fc1'")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_entries_that_are_not_finite_are_counted(value):
    matrix = torch.eye(3)
    matrix[1, 1] = value
    with pytest.raises(NonFiniteError, match=r"The factor A \[3, 3\] has 1 non-finite entries.*smaller learn"):
        cholesky(matrix, "factor A")


def test_a_matrix_that_is_not_square_is_refused():
    with pytest.raises(ShapeError, match=r"The factor A has shape \[2, 3\]; a Cholesky factor needs square"):
        cholesky(torch.zeros(2, 3), "factor A")


def test_a_product_names_its_factor():
    with pytest.raises(NotPositiveDefiniteError, match=r"right factor A of layer 'conv1'"):
        KroneckerProduct(torch.eye(2), torch.zeros(2, 2)).inverse("layer 'conv1'")


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("sides", [(3, 4), (5, 2 * BLOCK + 3), (BLOCK + 1, 1)], ids=str)
def test_skipping_the_zeros_of_triangular_factors_changes_nothing(sides, batch):
    """One block, several, and a last one that is not full."""
    generator = seeded(0)
    root = KroneckerProduct(*(normal(*batch, n, n, generator=generator).triu() for n in sides))
    x = normal(*batch, *sides, generator=generator)
    torch.testing.assert_close(root.upper_matvec(x), root.left @ x @ root.right.mT)


@pytest.mark.parametrize("side", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 75])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_products_skip_zeros_only(side, batch, generator):
    upper = torch.randn(*batch, side, side, generator=generator, dtype=torch.float64).triu()
    x = torch.randn(*batch, side, 3, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(upper_matmul(upper, x), upper @ x)
    torch.testing.assert_close(matmul_upper(x.mT, upper), x.mT @ upper)
