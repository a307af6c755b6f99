"""The generic rule for any module: `torch.func.vmap` of `torch.func.vjp` of that module alone.

    c_i = (∂ f(x_i; θ) / ∂θ)ᵀ δ_i

Each example runs through the module again as a batch of one, with the buffers of the forward. The rule costs a second
forward, stores as many c_i at once as fit the workspace, and is exact for modules that do not mix examples. `whole_batch`
handles modules that contain BatchNorm or draw noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.gradient_check import rounds_products
from lightning_bayes.curvature.rules.registry import PerExample, Sums
from lightning_bayes.curvature.rules.replayed_call import ReplayedCall, in_parts, used_outputs
from lightning_bayes.errors import ExampleDimensionError


@final
class ReplayedExamples(ReplayedCall):
    """A call that is repeated for single examples."""

    def _parts(self, grads: list[Tensor | None]) -> Iterator[PerExample]:
        if self.inputs.batch_size == 1:
            indices, cotangents = used_outputs(grads)
            gradients = self._vjp(indices)[1](cotangents)[0]
            yield {name: gradient.unsqueeze(0) for name, gradient in gradients.items()}
        if self.inputs.batch_size <= 1:
            return
        indices, cotangents = used_outputs(grads)
        first = self._replay(self.inputs.examples(0, 1))
        grad_dims = self._batch_dims([first[i] for i in indices], cotangents)
        in_dims = (*grad_dims, *self.inputs.dims)

        def select(start: int, count: int) -> list[Any]:
            selected = [grad.narrow(dim, start, count) for grad, dim in zip(cotangents, grad_dims, strict=True)]
            return [*selected, *self.inputs.examples(start, count)]

        def contributions(*values: Any) -> PerExample:
            pairs = zip(values, in_dims, strict=True)
            batched = [value if dim is None else value.unsqueeze(dim) for value, dim in pairs]  # a batch of one
            example_grads, leaves = batched[: len(grad_dims)], batched[len(grad_dims) :]
            pull_back = torch.func.vjp(lambda p: [self._replay(leaves, p)[i] for i in indices], self.measured)[1]
            gradient: PerExample = pull_back(example_grads)[0]
            return gradient

        size = self.workspace.examples_at_once(sum(p.numel() for p in self.measured.values()))
        yield from in_parts(contributions, select, in_dims, self.inputs.batch_size, size)

    def _batch_dims(self, example: list[Tensor], batch: list[Tensor]) -> list[int]:
        """The batch dimension of each output: the one in which a batch of one differs from the batch."""
        return [_differing_dim(self.module, a.shape, b.shape) for a, b in zip(example, batch, strict=True)]

    def _check_sum(self, grads: list[Tensor | None], sums: Sums) -> dict[str, Tensor]:
        """Require also that the contributions add up to the batch gradient."""
        gradient = super()._check_sum(grads, sums)
        # A gradient may be zero except for rounding (a shift before a normalisation), so the largest terms set the scale.
        scale = max(float(square.max()) ** 0.5 for _, square in sums.values())
        for name, grad in gradient.items():
            factor = 50 if rounds_products(grad) else 1
            tolerance = factor * (1e-4 * float(grad.abs().max()) + 1e-5 * scale)
            if not torch.allclose(sums[name][0], grad, rtol=1e-3, atol=tolerance):
                raise ExampleDimensionError(
                    f"The per-example gradients of {type(self.module).__name__}.{name} do not add up to its gradient. The "
                    f"module mixes examples, or has them in another dimension than {self.inputs.batch_dim}. Use batch-first "
                    "inputs, write a rule for it (see curvature/rules/linear.py), or freeze it."
                )
        return gradient


def _differing_dim(module: nn.Module, one: torch.Size, batch: torch.Size) -> int:
    dims = [dim for dim, (a, b) in enumerate(zip(one, batch, strict=True)) if a != b]
    if len(dims) > 1:
        raise ExampleDimensionError(
            f"{type(module).__name__} returns {tuple(one)} for one example but {tuple(batch)} for a batch: its output has "
            "no single batch dimension. Write a rule for it, or freeze it."
        )
    return dims[0] if dims else 0
