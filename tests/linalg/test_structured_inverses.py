"""Differences and chains of Kronecker products against dense linear algebra (Martens & Grosse 2015)."""

from __future__ import annotations

import pytest
import torch
from random_matrices import F64, chain, normal, seeded, spd

from lightning_bayes.errors import ShapeError
from lightning_bayes.linalg import BlockTridiagonalInverse, DifferenceInverse, KroneckerProduct

SEEDS = range(4)
SIDES = [(4, 3), (2, 5), (3, 3)]  # (out, columns) of three layers


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_inverse_of_a_difference_is_dense(seed, batch):
    generator = seeded(seed)
    smaller = KroneckerProduct(spd(3, *batch, generator=generator), spd(4, *batch, generator=generator))
    larger = KroneckerProduct(*(m + spd(m.shape[-1], *batch, generator=generator) for m in smaller))
    x, inverse = normal(*batch, 3, 4, generator=generator), DifferenceInverse.of(larger, smaller)
    dense = larger.dense() - smaller.dense()
    solved = torch.linalg.solve(dense, x.flatten(-2)[..., None])[..., 0]
    torch.testing.assert_close(inverse.matvec(x).flatten(-2), solved)
    torch.testing.assert_close(inverse.log_det(), torch.logdet(dense))
    torch.testing.assert_close(inverse.inverse_root(inverse.root(x)), x)
    basis = torch.eye(12, dtype=F64).reshape(12, *[1] * len(batch), 3, 4)
    columns = torch.stack([inverse.root(e).flatten(-2) for e in basis], -1)
    torch.testing.assert_close(columns @ columns.mT, torch.linalg.inv(dense))


def test_a_sample_is_a_continuous_function_of_the_matrices():
    """Eigenvectors are not: of equal eigenvalues any basis is one, and rounding decides which."""
    generator = seeded(1)
    larger = KroneckerProduct(4 * torch.eye(3, dtype=F64), spd(4, generator=generator))
    smaller = KroneckerProduct(torch.eye(3, dtype=F64), 0.1 * larger.right)
    noise, change = normal(3, 4, generator=generator), 1e-13 * spd(3, generator=generator)
    near = KroneckerProduct(smaller.left + change, smaller.right)
    exact, other = (DifferenceInverse.of(larger, each).root(noise) for each in (smaller, near))
    torch.testing.assert_close(other, exact, rtol=1e-9, atol=1e-9)


def test_layers_that_determine_each_other_stay_finite():
    factors = KroneckerProduct(spd(2, generator=seeded(0)), spd(3, generator=seeded(1)))
    inverse = DifferenceInverse.of(factors, factors)  # the difference is zero in some direction
    assert inverse.matvec(torch.ones(2, 3, dtype=F64)).isfinite().all()


def dense_chain(own, links):
    """F̂⁻¹ and the blocks of F̂ from dense regressions of each layer on the next."""
    blocks = [torch.kron(*pair) for pair in own]
    psi = [torch.kron(*link) @ torch.linalg.inv(after) for link, after in zip(links, blocks[1:], strict=True)]
    conditional = [
        *(block - p @ after @ p.T for block, p, after in zip(blocks, psi, blocks[1:], strict=False)),
        blocks[-1],
    ]
    starts = [0, *torch.tensor([len(b) for b in blocks]).cumsum(0).tolist()]
    xi = torch.eye(starts[-1], dtype=F64)
    for i, p in enumerate(psi):
        xi[starts[i] : starts[i + 1], starts[i + 1] : starts[i + 2]] = -p
    return xi.T @ torch.block_diag(*(torch.linalg.inv(c) for c in conditional)) @ xi, starts


def flat(matrices):
    return torch.cat([m.flatten() for m in matrices])


def parts(vector, sides):
    pieces = torch.split(vector, [rows * columns for rows, columns in sides])
    return [piece.reshape(side) for piece, side in zip(pieces, sides, strict=True)]


def built(own, links):
    return BlockTridiagonalInverse.of(*([KroneckerProduct(*p) for p in pairs] for pairs in (own, links)))


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_chain_is_its_dense_twin(seed, layers):
    sides = SIDES[:layers]
    own, links = chain(sides, seeded(seed))
    inverse, (dense, starts) = built(own, links), dense_chain(own, links)
    basis = torch.eye(starts[-1], dtype=F64)
    found = torch.stack([flat(inverse.matvec(parts(e, sides))) for e in basis], 1)
    torch.testing.assert_close(found, dense)
    root = torch.stack([flat(inverse.root(parts(e, sides))) for e in basis], 1)
    torch.testing.assert_close(root @ root.T, dense)
    torch.testing.assert_close(flat(inverse.diagonal()), dense.diagonal())
    torch.testing.assert_close(inverse.log_det(), -torch.logdet(dense))
    x = parts(normal(starts[-1], generator=seeded(9)), sides)
    torch.testing.assert_close(flat(inverse.inverse_root(inverse.root(x))), flat(x))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_blocks_on_and_next_to_the_diagonal_are_kept(seed):
    own, links = chain(SIDES, seeded(seed))
    sides, basis = SIDES, torch.eye(sum(r * c for r, c in SIDES), dtype=F64)
    inverse = built(own, links)
    curvature = torch.linalg.inv(torch.stack([flat(inverse.matvec(parts(e, sides))) for e in basis], 1))
    starts = [0, *torch.tensor([r * c for r, c in sides]).cumsum(0).tolist()]
    for i, pair in enumerate(own):
        torch.testing.assert_close(curvature[starts[i] : starts[i + 1], starts[i] : starts[i + 1]], torch.kron(*pair))
    for i, pair in enumerate(links):
        here, after = slice(starts[i], starts[i + 1]), slice(starts[i + 1], starts[i + 2])
        torch.testing.assert_close(curvature[here, after], torch.kron(*pair))
    covariance = torch.linalg.inv(curvature)
    assert covariance[: starts[1], starts[2] :].abs().max() < 1e-9 * covariance.abs().max()  # block-tridiagonal


@pytest.mark.parametrize("seed", SEEDS)
def test_two_layers_are_exact_and_one_is_its_kronecker_product(seed):
    own, links = chain(SIDES[:2], seeded(seed))
    blocks, link = [torch.kron(*pair) for pair in own], torch.kron(*links[0])
    whole = torch.cat([torch.cat([blocks[0], link], 1), torch.cat([link.T, blocks[1]], 1)])
    x = normal(len(whole), generator=seeded(5))
    found = flat(built(own, links).matvec(parts(x, SIDES[:2])))
    torch.testing.assert_close(found, torch.linalg.solve(whole, x))
    alone = parts(x[:12], SIDES[:1])
    torch.testing.assert_close(
        built(own[:1], []).matvec(alone)[0], KroneckerProduct(*own[0]).inverse().matvec(alone[0])
    )


def test_a_missing_block_between_layers_is_counted():
    own, links = chain(SIDES, seeded(0))
    with pytest.raises(ShapeError, match=r"3 layers have 2 pairs of neighbours, but got 1 blocks between layers"):
        built(own, links[:1])
