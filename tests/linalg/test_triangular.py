"""Products with triangular matrices, compared with dense products."""

from __future__ import annotations

import pytest
import torch

from lightning_bayes.linalg.factors import BLOCK, matmul_upper, upper_matmul


@pytest.mark.parametrize("side", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 75])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_products_skip_zeros_only(side, batch, generator):
    upper = torch.randn(*batch, side, side, generator=generator, dtype=torch.float64).triu()
    x = torch.randn(*batch, side, 3, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(upper_matmul(upper, x), upper @ x)
    torch.testing.assert_close(matmul_upper(x.mT, upper), x.mT @ upper)
