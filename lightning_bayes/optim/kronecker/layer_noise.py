"""Noise of layer matrices, U = R_S E R_Aᵀ, with matrix products shared between updates.

The two products cost 2mn(m + n) operations for a matrix ``[m, n]``, regardless of the batch size. Antithetic noise
shares them (`optim.runtime.noise`): both updates of a pair use the same U with opposite signs, and all pairs of a pool
share the product with the root of the longer side. If m ≤ n, the pool has POOL_PAIRS - 1 more rows than the matrix, and
each pair uses a window:

    V = E R_Aᵀ              E [m + POOL_PAIRS - 1, n], once per pool
    U = R_S V[p : p + m]    once per pair p

If m > n, the same applies to columns. No entry of the matrix uses the same element of E in two pairs of a pool, and the
noise of every update has exactly the covariance R_S R_Sᵀ ⊗ R_A R_Aᵀ. Nothing here is part of the optimizer's state:
after an inversion or a resume, V and U are recomputed from the same draws.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct, upper_matmul
from lightning_bayes.optim.readout.layer import mean_variance
from lightning_bayes.optim.runtime.noise import CounterNoise, Pool
from lightning_bayes.private_torch import version_of

POOL_PAIRS = 50  # pairs per pool: with the default intervals, the number of pairs between two inversions of a layer


@final
class LayerNoise:
    """Noise of one layer's matrix, for fixed roots.

    Args:
        root: R_S ⊗ R_A, upper triangular.

    Attributes:
        mean_variance: Mean variance of the entries of U, see `optim.readout.layer`.
    """

    def __init__(self, root: KroneckerProduct) -> None:
        self.root, self._versions = root, [version_of(side) for side in root]
        self.mean_variance = mean_variance(root)
        self._is_wide = root.left.shape[-1] <= root.right.shape[-1]
        self._short, self._long = root if self._is_wide else reversed(root)
        self._pool: tuple[Pool, Tensor] | None = None  # with V
        self._pair: tuple[Pool, Tensor] | None = None  # with U

    def is_of(self, root: KroneckerProduct) -> bool:
        """Whether `root` is the root of this noise and has not been modified since."""
        is_same = all(side is other for side, other in zip(self.root, root, strict=True))
        return is_same and self._versions == [version_of(side) for side in root]

    def draw(self, pool: Pool) -> Tensor:
        """Compute the noise of a pair of updates.

        Args:
            pool: The pass's pool of draws and its pair.

        Returns:
            U without its sign, ``[..., m, n]``. The next call may return the same tensor.
        """
        if self._pair is None or self._pair[0] != pool:
            self._pair = None  # frees memory before the next U is allocated
            if self._pool is None or self._pool[0].counter != pool.counter:
                self._pool = None
                self._pool = pool, self._transformed_pool(pool)
            window = self._pool[1].narrow(-2, pool.pair, self._short.shape[-1])
            self._pair = pool, self._oriented(upper_matmul(self._short, window))
        return self._pair[1]

    def _transformed_pool(self, pool: Pool) -> Tensor:
        """V, transposed if necessary so that its rows belong to the shorter side."""
        sides = self._short.shape[-1] + POOL_PAIRS - 1, self._long.shape[-1]
        draws = self._long.new_empty(*self._long.shape[:-2], *(sides if self._is_wide else sides[::-1]))
        CounterNoise(*pool.counter).draw_([draws])
        return upper_matmul(self._long, self._oriented(draws).mT).mT

    def _oriented(self, matrix: Tensor) -> Tensor:
        """Transpose a matrix unless its rows already belong to the shorter side; its own inverse."""
        return matrix if self._is_wide else matrix.mT
