"""Products in TF32 or bfloat16, as Lightning recommends on GPUs, are no mixing of examples."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.curvature.gradient_check import rounds_products
from lightning_bayes.errors import BayesError


class Rounded(nn.Module):
    """A linear map whose product for several examples has another rounding than the product for one."""

    def __init__(self, error):
        super().__init__()
        self.weight, self.error = nn.Parameter(torch.ones(3, 2)), error

    def forward(self, x):
        return F.linear(x, self.weight * (1 + self.error if len(x) > 1 else 1.0))


@pytest.fixture
def precision():
    """Sets the precision of float32 products, until the end of the test."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def squared_loss(module):
    x = torch.arange(12.0).view(6, 2)
    return F.mse_loss(module(x), torch.zeros(6, 3))


@pytest.mark.parametrize("wanted", ["high", "medium"])
def test_rounded_products_pass_the_check_of_a_module_without_a_rule(precision, wanted):
    precision(wanted)
    module = Rounded(2e-3)
    found = measure(module, partial(squared_loss, module))
    assert found.curvature["weight"].shape == module.weight.shape


@pytest.mark.parametrize(("wanted", "error"), [("highest", 2e-3), ("high", 0.1)])
def test_what_no_rounding_explains_is_refused(precision, wanted, error):
    precision(wanted)
    module = Rounded(error)
    with pytest.raises(BayesError, match="do not add up"):
        measure(module, partial(squared_loss, module))


def test_only_float32_on_a_cpu_at_full_precision_is_exact(precision):
    precision("highest")
    assert not rounds_products(torch.zeros(1))
    precision("high")
    assert rounds_products(torch.zeros(1))
    assert not rounds_products(torch.zeros(1, dtype=torch.float64))
    assert rounds_products(torch.zeros(1, device="meta"))
