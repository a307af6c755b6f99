"""Matrix noise from pools: transformed windows, their distribution, and invalidation."""

from __future__ import annotations

import pytest
import torch
from random_matrices import F64, seeded, spd
from torch import nn

from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim import CounterNoise, NoisyKFAC
from lightning_bayes.optim.kronecker.layer_noise import POOL_PAIRS, LayerNoise
from lightning_bayes.optim.runtime.noise import Pool

SIDES = {"wide": (3, 5), "square": (4, 4), "tall": (6, 2), "one row": (1, 7)}


def root_of(rows, columns, groups=None, seed=0):
    generator, lead = seeded(seed), () if groups is None else (groups,)
    left, right = (
        torch.stack([spd(side, generator=generator) for _ in range(groups or 1)]).view(*lead, side, side)
        for side in (rows, columns)
    )
    return KroneckerProduct(left, right).inverse_root()


def window(pool, root):
    """E of a pair: its window of the pool, along the shorter side."""
    (rows, columns), lead = (side.shape[-1] for side in root), root.left.shape[:-2]
    more = (POOL_PAIRS - 1, 0) if rows <= columns else (0, POOL_PAIRS - 1)
    drawn = torch.empty(*lead, rows + more[0], columns + more[1], dtype=root.left.dtype)
    CounterNoise(*pool.counter).fill_([drawn])
    dim, size = (-2, rows) if rows <= columns else (-1, columns)
    return drawn.narrow(dim, pool.pair, size)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)
def test_a_pair_is_its_window_of_the_pool_transformed(sides, groups):
    root = root_of(*sides, groups)
    noise = LayerNoise(root)
    for pool in (Pool((3, 0), 0), Pool((3, 0), 1), Pool((3, 0), POOL_PAIRS - 1), Pool((4, 0), 2)):
        expected = root.left @ window(pool, root) @ root.right.mT
        torch.testing.assert_close(noise.draw(pool), expected)
        assert torch.equal(noise.draw(pool), LayerNoise(root).draw(pool))  # as in a resumed run


def test_an_entry_never_meets_the_same_number_in_two_pairs():
    identity = KroneckerProduct(torch.eye(3, dtype=F64), torch.eye(4, dtype=F64))
    noise = LayerNoise(identity)
    draws = torch.stack([noise.draw(Pool((0, 0), pair)).clone() for pair in range(POOL_PAIRS)])
    assert all(len(entry.unique()) == POOL_PAIRS for entry in draws.flatten(1).T)


def test_the_noise_has_the_covariance_of_its_roots(generator):
    """Covariance over 400 pools, one pair each, in standard errors of a Gaussian's second moments."""
    root = root_of(2, 3)
    draws = torch.stack([LayerNoise(root).draw(Pool((seed, 0), seed % POOL_PAIRS)).flatten() for seed in range(400)])
    truth = root.dense() @ root.dense().T
    variance = truth.diagonal()
    error = ((variance[:, None] * variance + truth.square()) / len(draws)).sqrt()
    assert ((draws.T @ draws / len(draws) - truth) / error).abs().max() < 4.2


def test_new_roots_make_new_noise():
    old, new = root_of(3, 5), root_of(3, 5, seed=1)
    noise = LayerNoise(old)
    assert noise.is_of(KroneckerProduct(*old))
    assert not any(map(noise.is_of, (new, KroneckerProduct(old.left, new.right))))
    old.left.mul_(2)  # as processes do that exchange inverses
    assert not noise.is_of(old)


def displacements(opt, updates):
    """W - M of each update."""
    layer, found = opt.model, []
    for _ in range(updates):
        mean = layer.weight.detach().clone()
        with opt.sampled_params():
            found.append(layer.weight.detach() - mean)
            layer(torch.ones(4, 3)).square().mean().backward()
        opt.step()
    return found


def test_updates_of_a_pair_have_opposite_noise():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    base = torch.optim.SGD(layer.parameters(), lr=0.0)
    opt = NoisyKFAC(layer, base=base, num_data=50, init_precision=80.0, stats_interval=1000, inverse_interval=1000)
    displacements(opt, 2)  # the first measurement is inverted
    first, second, third, fourth = displacements(opt, 4)
    torch.testing.assert_close(first, -second)
    torch.testing.assert_close(third, -fourth)
    assert not torch.allclose(first.abs(), third.abs())
