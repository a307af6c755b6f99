"""Collecting measured passes into one mean gradient and one mean curvature.

Passes between two updates may be samples of the weights, micro-batches, or both. Each counts by its number of examples:

    ĝ = Σ_p n_p ĝ_p / Σ_p n_p        ĥ = Σ_p n_p ĥ_p / Σ_p n_p

so micro-batches under the same noise equal one large batch. ĝ lives in ``param.grad``, where clipping finds it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import Capture, Workspace


class PassCollector:
    """Running means over the passes of one update.

    Args:
        workspace: Gets back the memory of ĥ.

    Attributes:
        examples: Σ_p n_p, 0 before the first pass.
        curvature: ĥ by parameter.
        loss: Mean loss, a scalar; None before the first pass that showed its loss.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self.examples = 0.0
        self.curvature: dict[nn.Parameter, Tensor] = {}
        self.loss: Tensor | None = None

    def add(
        self, captured: Capture, grads: dict[nn.Parameter, Tensor | None], curvature: dict[nn.Parameter, Tensor]
    ) -> None:
        """Fold one pass in; afterwards each ``param.grad`` is ĝ.

        Args:
            captured: The finished pass; the parameters' ``.grad`` is its own gradient.
            grads: ĝ before this pass by parameter.
            curvature: ĥ of this pass. (The gradient may still be scaled for mixed precision: a GradScaler divides later.)
        """
        n = captured.num_examples
        share = n / (self.examples + n)
        factor = captured.gradient_factor()
        for param, before in grads.items():
            param.grad = _mean(before if self.examples else None, param.grad, share, factor)
        for param in grads:
            new = _mean(self.curvature.get(param), curvature.get(param), share, 1.0)
            if new is not None:
                self.curvature[param] = new
        self.loss = _mean(self.loss, captured.loss, share, factor)
        self.examples += n

    def tensors(self, params: Iterable[nn.Parameter]) -> list[Tensor]:
        """Loss, ĝ and ĥ of `params` in one list, zeros where nothing was measured: what ranks must agree on.

        Args:
            params: Parameters in an order that all ranks share.

        Returns:
            The tensors; writing to them changes the means.
        """
        both: list[Tensor] = []
        for param in params:
            if self.loss is None:
                self.loss = torch.zeros((), device=param.device)
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            if param not in self.curvature:
                self.curvature[param] = torch.zeros_like(param)
            both += [param.grad, self.curvature[param]]
        return both if self.loss is None else [self.loss, *both]

    def clear(self) -> None:
        """Forget all passes."""
        self._workspace.give_back(self.curvature.values())
        self.examples = 0.0
        self.curvature, self.loss = {}, None


def _mean(old: Tensor | None, new: Tensor | None, share: float, factor: float) -> Tensor | None:
    """(1-share)·old + share·factor·new, where a missing tensor is zero."""
    if new is None:
        return None if old is None else old.mul_(1 - share)
    if old is None:
        return new if factor * share == 1 else new.mul_(factor * share)  # a single pass is its own mean
    return old.mul_(1 - share).add_(new, alpha=factor * share)
