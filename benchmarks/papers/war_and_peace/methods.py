"""The optimizers of Khan et al. 2018, Table 4, and callbacks on top of an ordinary Adam.

    method      K, epochs until α/10     α          β
    VadaGrad    40                       0.0075     0.5     s₁ = 1e-4
    SGD         80                       0.5
    AdaGrad     80                       0.025      0.5     s₁ = 0
    Adam        40                       0.0012     0.999

The paper does not state the architecture, N and the split, and it chose α by the test loss. AdaGrad with β is torch's with
lr = α/√β. Here N of VadaGrad is the number of characters, so the initial noise has the standard deviation 1/√(N s₁).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bayes import IVONCallback, VadaGradCallback, VadamCallback, VariationalCallback

START: Final = 1e-4  # s₁ of VadaGrad


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    title: str
    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    callback: Callable[[int, int], VariationalCallback] | None = None


def _adam_as_printed(params: Iterable[Tensor]) -> Optimizer:
    return torch.optim.Adam(params, lr=0.0012, betas=(0.9, 0.999))


def _adam(params: Iterable[Tensor]) -> Optimizer:
    return torch.optim.Adam(params, lr=2.5e-3)  # as in DeepOBS


def _sgd(params: Iterable[Tensor]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def _adagrad(params: Iterable[Tensor]) -> Optimizer:
    return torch.optim.Adagrad(params, lr=0.025 / 0.5**0.5)


def _vadagrad(characters: int, samples: int) -> VariationalCallback:
    return VadaGradCallback(
        lr=0.0075, betas=(0.0, 0.5), prior_precision=1e-8, init_precision=START * characters, eval_samples=samples
    )


METHODS: Final = {
    "adam": Method("Adam, 2.5e-3", _adam),
    "vadam": Method("Vadam callback, Adam 2.5e-3", _adam, lambda _, samples: VadamCallback(eval_samples=samples)),
    "ivon": Method("IVON callback, Adam 2.5e-3", _adam, lambda _, samples: IVONCallback(eval_samples=samples)),
    "adam_as_printed": Method("Adam, 1.2e-3", _adam_as_printed),
    "adagrad": Method("AdaGrad", _adagrad),
    "sgd": Method("SGD", _sgd),
    "vadagrad": Method("VadaGrad as printed", _sgd, _vadagrad),
}
