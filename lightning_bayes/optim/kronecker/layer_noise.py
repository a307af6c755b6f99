"""The noise of matrices, U = R_S E R_Aᵀ, without transforming every draw.

Both products take 2mn(m + n) operations for a matrix ``[m, n]``, whatever the size of the batch. Antithetic noise therefore
shares them (`optim.runtime.noise`): a pair of updates has one U, with opposite signs, and the pairs of a pool share the
product with the longer side's root. For m ≤ n the pool has a few more rows than the matrix, and each pair takes a window:

    V = E R_Aᵀ              E [m + PAIRS - 1, n], once for a pool
    U = R_S V[p : p + m]    once for pair p

and for m > n likewise by columns. An entry of the matrix never meets the same number of E in two pairs of a pool, and every
update's noise has exactly the covariance R_S R_Sᵀ ⊗ R_A R_Aᵀ. Nothing of this is state: new roots, and a resumed run,
compute it again from the same draws.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct, upper_matmul
from lightning_bayes.optim.readout.shape import mean_variance
from lightning_bayes.optim.runtime.noise import CounterNoise, Pool
from lightning_bayes.private_torch import version_of

PAIRS = 50  # that share a pool: as many as fit between two inversions of a layer by default


@final
class LayerNoise:
    """The noise of one layer's matrix while its roots stay as they are.

    Args:
        root: R_S ⊗ R_A, upper triangular.

    Attributes:
        mean_variance: The mean of U's variances, see `optim.readout.shape`.
    """

    def __init__(self, root: KroneckerProduct) -> None:
        self.root, self._versions = root, [version_of(side) for side in root]
        self.mean_variance = mean_variance(root)
        self._is_wide = root.left.shape[-1] <= root.right.shape[-1]
        self._short, self._long = root if self._is_wide else reversed(root)
        self._pool: tuple[Pool, Tensor] | None = None  # and V
        self._pair: tuple[Pool, Tensor] | None = None  # and U

    def is_of(self, root: KroneckerProduct) -> bool:
        """Whether these are its roots, as they were."""
        is_same = all(mine is other for mine, other in zip(self.root, root, strict=True))
        return is_same and self._versions == [version_of(side) for side in root]

    def draw(self, pool: Pool) -> Tensor:
        """Transform the draws of a pair.

        Args:
            pool: The pool of the pass's draws, and its pair.

        Returns:
            U except for its sign, ``[..., m, n]``; the next call may return it again.
        """
        if self._pair is None or self._pair[0] != pool:
            self._pair = None  # before memory for the next one is taken
            self._pair = pool, self._of_pair(pool)
        return self._pair[1]

    def _of_pair(self, pool: Pool) -> Tensor:
        if self._pool is None or self._pool[0].counter != pool.counter:
            self._pool = None
            self._pool = pool, self._transformed(pool)
        window = self._pool[1].narrow(-2, pool.pair, self._short.shape[-1])
        return self._turned(upper_matmul(self._short, window))

    def _transformed(self, pool: Pool) -> Tensor:
        """V, turned so that the shorter side has the rows."""
        sides = self._short.shape[-1] + PAIRS - 1, self._long.shape[-1]
        drawn = self._long.new_empty(*self._long.shape[:-2], *(sides if self._is_wide else sides[::-1]))
        CounterNoise(*pool.counter).draw_([drawn])
        return upper_matmul(self._long, self._turned(drawn).mT).mT

    def _turned(self, matrix: Tensor) -> Tensor:
        return matrix if self._is_wide else matrix.mT
