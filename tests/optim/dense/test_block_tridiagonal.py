"""The block-tridiagonal update against dense linear algebra: noise, step, intervals, and its special cases."""

from __future__ import annotations

import pytest
import torch
from kronecker_layers import start, take_step
from random_matrices import F64, chain, dense_damped, normal, seeded

from lightning_bayes.linalg import KroneckerProduct, pi_damped
from lightning_bayes.optim.dense.block_tridiagonal import ChainCurvature, ChainState, damped_inverse, sample, update
from lightning_bayes.optim.kronecker import equations
from lightning_bayes.posteriors import BlockTridiagonal

SIDES = [(4, 3), (2, 5)]
PRIOR, DAMPING, N, TAU = 0.02, 0.05, 30.0, 0.5


def curvature(seed, sides=SIDES):
    return ChainCurvature(*(tuple(KroneckerProduct(*p) for p in pairs) for pairs in chain(sides, seeded(seed))))


def matrices(seed, sides=SIDES):
    generator = seeded(seed)
    return [normal(*side, generator=generator) for side in sides]


def state(sides=SIDES):
    means = matrices(1, sides)
    return ChainState(tuple(means), tuple(map(torch.zeros_like, means)), curvature(0, sides))


def draw(at, noise, damping=0.0, kl_weight=1.0):
    return sample(at.means, damped_inverse(at.curvature, PRIOR + damping), noise, num_data=N, kl_weight=kl_weight)


def step(at, grads, measured=None, betas=(0.0, 1.0), damping=DAMPING, **arguments):
    """One update; by default without changing the curvature."""
    measured = at.curvature if measured is None else measured
    return update(at, grads, measured, betas=betas, prior=PRIOR, damping=damping, **arguments)


def flat(values):
    return torch.cat([v.flatten() for v in values])


def parts(vector, sides=SIDES):
    pieces = torch.split(vector, [rows * columns for rows, columns in sides])
    return [piece.view(side) for piece, side in zip(pieces, sides, strict=True)]


def dense(measured, damping):
    """For two layers F̂ is exact: damped diagonal blocks and the undamped link."""
    blocks, link = [dense_damped(block, damping) for block in measured.blocks], torch.kron(*measured.links[0])
    return torch.cat([torch.cat([blocks[0], link], 1), torch.cat([link.T, blocks[1]], 1)])


@pytest.mark.parametrize("in_noise", [False, True])
def test_the_noise_has_the_dense_covariance(in_noise):
    """E18: T Tᵀ = (τ/Ñ) F̂⁻¹; damping outside the noise or inside."""
    at, damping = state(), DAMPING if in_noise else 0.0
    basis = torch.eye(22, dtype=F64)
    root = torch.stack([flat(draw(at, parts(e), damping, TAU)) - flat(at.means) for e in basis], 1)
    truth = TAU / N * torch.linalg.inv(dense(at.curvature, PRIOR + damping))
    torch.testing.assert_close(root @ root.T, truth)


def test_the_step_solves_with_the_dense_curvature():
    at, grads = state(), matrices(5)
    move = torch.linalg.solve(dense(at.curvature, PRIOR + DAMPING), flat(grads) + PRIOR * flat(at.means))
    torch.testing.assert_close(flat(step(at, grads, lr=0.3).means), flat(at.means) - 0.3 * move)


@pytest.mark.parametrize("bound", [1e-6, 1e3])
def test_the_clip_bounds_the_fisher_norm(bound):
    at, grads = state(), matrices(5)
    curved = dense(at.curvature, PRIOR + DAMPING)
    clipped, free = (flat(step(at, grads, lr=0.1, kl_clip=c).means) - flat(at.means) for c in (bound, None))
    assert (clipped @ curved @ clipped).item() == pytest.approx(min(bound, (free @ curved @ free).item()))


def test_momentum_is_a_corrected_average():
    at, total = state(), torch.zeros(22, dtype=F64)
    inverse = damped_inverse(at.curvature, PRIOR + DAMPING)
    for number in range(1, 4):
        grads = matrices(10 + number)
        total = 0.9 * total + 0.1 * (flat(grads) + PRIOR * flat(at.means))
        expected = flat(at.means) - 0.1 * flat(inverse.matvec(parts(total / (1 - 0.9**number))))
        at = step(at, grads, lr=0.1, betas=(0.9, 1.0), step=number)
        torch.testing.assert_close(flat(at.means), expected)


def test_one_layer_is_noisy_kfac():
    sides = SIDES[:1]
    at, grad, noise = state(sides=sides), normal(4, 3, generator=seeded(5)), normal(4, 3, generator=seeded(6))
    single = start(at.means[0], at.curvature.blocks[0], prior=PRIOR, damping=DAMPING)
    chained = step(at, [grad], lr=0.1, betas=(0.9, 1.0), kl_clip=1e-3)
    (alone,) = take_step([single], [grad], lr=0.1, beta=0.9, prior=PRIOR, kl_clip=1e-3)
    torch.testing.assert_close(chained.means[0], alone.mean)
    found, truth = draw(at, [noise])[0], equations.sample(single.mean, single.root, noise, num_data=N)
    torch.testing.assert_close(found, truth)


def test_without_links_layers_are_noisy_kfac_each():
    measured = curvature(0)
    apart = ChainCurvature(measured.blocks, (KroneckerProduct(*(0 * f for f in measured.links[0])),))
    at, grads = state()._replace(curvature=apart), matrices(5)
    new = step(at, grads, lr=0.1, damping=0.0)
    for mean, block, grad, found in zip(at.means, apart.blocks, grads, new.means, strict=True):
        (alone,) = take_step([start(mean, block, prior=PRIOR)], [grad], lr=0.1, prior=PRIOR)
        torch.testing.assert_close(found, alone.mean)


def test_measurements_are_averaged_before_the_step():
    at, measured, grads = state(), curvature(9), matrices(7)
    new = step(at, grads, measured, lr=0.3, betas=(0.0, 0.75))
    for old, now, found in zip(at.curvature, measured, new.curvature, strict=True):
        for a, b, c in zip(flat_pairs(old), flat_pairs(now), flat_pairs(found), strict=True):
            torch.testing.assert_close(c, 0.75 * a + 0.25 * b)
    averaged = step(at._replace(curvature=new.curvature), grads, lr=0.3)
    torch.testing.assert_close(flat(new.means), flat(averaged.means))


def flat_pairs(products):
    return [factor for product in products for factor in product]


def test_its_noise_is_the_posteriors():
    """Damped blocks and links, the scale Ñ/τ in the left factors, give the `BlockTridiagonal` of a checkpoint."""
    at, scale = state(), N / TAU
    blocks = [pi_damped(block, PRIOR + DAMPING) for block in at.curvature.blocks]
    factors = {n: (b.left * scale, b.right) for n, b in zip("ab", blocks, strict=True)}
    link = at.curvature.links[0]
    means = dict(zip("ab", at.means, strict=True))
    q = BlockTridiagonal(means, factors, {"a": (link.left * scale, link.right)}, {}, {"a": 1.0, "b": 1.0}, N)
    roots = []
    for drawn in (
        lambda noise: q.transform(dict(zip("ab", noise, strict=True))).values(),
        lambda noise: draw(at, noise, DAMPING, TAU),
    ):
        columns = [flat(drawn(parts(e))) - flat(at.means) for e in torch.eye(22, dtype=F64)]
        roots.append(torch.stack(columns, 1))
    torch.testing.assert_close(roots[0] @ roots[0].T, roots[1] @ roots[1].T)  # eigenvectors may differ in sign
