"""The exact Hessian of a small model's loss over all of its weights, with one backward pass per weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.loss import LossReduction, refuse_losses


@final
class HessianCapture(Capture):
    """Sums the Hessians of the observed losses of a pass, for all layers that torch can differentiate twice."""

    measure_losses = refuse_losses

    def __init__(self, params: Sequence[nn.Parameter], loss_reduction: LossReduction) -> None:
        super().__init__(loss_reduction)
        self.params = params
        self.hessian: Tensor | None = None  # [D, D], on the scale of the observed losses

    def observe(self, loss: Tensor, divided_by_host: bool = False) -> None:
        """Read the loss's scale and compute its Hessian."""
        super().observe(loss, divided_by_host)
        with torch.enable_grad():
            hessian = hessian_of(loss, self.params)
        self.hessian = hessian if self.hessian is None else self.hessian + hessian

    def mean_hessian(self) -> Tensor:
        """The Hessian of the mean loss, ``[D, D]``."""
        assert self.hessian is not None
        return self.hessian * self.gradient_factor


def hessian_of(loss: Tensor, params: Sequence[nn.Parameter]) -> Tensor:
    """The symmetric Hessian of a loss over all weights, ``[D, D]``, each parameter flattened; retains the graph."""
    gradient = _flat(torch.autograd.grad(loss, params, create_graph=True, materialize_grads=True))
    if not gradient.requires_grad:  # the loss is linear
        return gradient.new_zeros(len(gradient), len(gradient))
    rows = [_flat(torch.autograd.grad(entry, params, retain_graph=True, materialize_grads=True)) for entry in gradient]
    hessian = torch.stack(rows).detach()
    return (hessian + hessian.mT) / 2


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
