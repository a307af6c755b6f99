"""Random symmetric positive definite matrices, and chains of layers whose joint moments are consistent."""

from __future__ import annotations

import math

import torch

F64 = torch.float64


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, generator):
    return torch.randn(*shape, generator=generator, dtype=F64)


def spd(size, *batch, generator):
    rows = normal(*batch, size, size + 3, generator=generator)
    return rows @ rows.mT / (size + 3)


def dense_damped(factors, damping):
    """(S + √γ/π I) ⊗ (A + π√γ I), term by term."""
    s, a = factors
    ratio = math.sqrt((a.trace() / len(a)) / (s.trace() / len(s)))
    s = s + math.sqrt(damping) / ratio * torch.eye(len(s), dtype=F64)
    return torch.kron(s, a + ratio * math.sqrt(damping) * torch.eye(len(a), dtype=F64))


def chain(sides, generator, examples=40):
    """Second moments of layers [(out, columns)]: own blocks (S, A), and links (S, A) between neighbours."""
    inputs = moments([columns for _, columns in sides], generator, examples)
    outputs = moments([rows for rows, _ in sides], generator, examples)
    pairs = {where: (outputs[where], inputs[where]) for where in outputs}
    own = [pairs[i, i] for i in range(len(sides))]
    return own, [pairs[i, i + 1] for i in range(len(sides) - 1)]


def moments(sizes, generator, examples):
    """Second moments of correlated vectors of the given sizes."""
    common = normal(examples, 3, generator=generator)
    rows = [common @ normal(3, n, generator=generator) + normal(examples, n, generator=generator) for n in sizes]
    near = [(i, j) for i in range(len(sizes)) for j in (i, i + 1) if j < len(sizes)]
    return {(i, j): rows[i].T @ rows[j] / examples for i, j in near}
