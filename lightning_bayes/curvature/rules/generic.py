"""The generic rule for any module: `torch.func.vmap` of `torch.func.vjp` of that module alone.

    c_i = (∂ f(x_i; θ) / ∂θ)ᵀ δ_i

Each example runs through the module again as a batch of one, with the buffers and random numbers of the forward. The rule
costs a second forward, stores as many c_i at once as fit the workspace, and is exact for modules that do not mix examples.
`whole_batch` handles modules that contain BatchNorm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.random_numbers import set_rng, with_rng
from lightning_bayes.curvature.rules.registry import PerExample, Sums
from lightning_bayes.curvature.rules.replayed_call import ReplayedCall, are_close, in_parts, used_outputs
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError


@final
class ReplayedExamples(ReplayedCall):
    """A call that is repeated for single examples."""

    def gradient(self, grads: list[Tensor | None]) -> dict[str, Tensor]:
        """See `ReplayedCall.gradient`. Raises `UnsupportedLayerError` for a module with noise."""
        if self._rng_state is not None:
            raise UnsupportedLayerError(
                f"{type(self.module).__name__} has no curvature rule, draws noise, and examples share its output. Call it "
                "with the batch in dimension 0, or freeze its parameters with requires_grad_(False)."
            )
        return super().gradient(grads)

    def _with_repeatable_noise(self, outputs: list[Tensor], rng: list[Tensor]) -> list[Tensor]:
        """Run example by example."""
        set_rng(rng)
        parts = [self._replay(self.inputs.examples(i, 1)) for i in range(self.inputs.batch_size)]
        dims = self._batch_dims(parts[0], outputs)
        if not self._is_checked:
            self._require_independent(outputs, dims)
        return [torch.cat(pieces, dim) for pieces, dim in zip(zip(*parts, strict=True), dims, strict=True)]

    @torch.no_grad()
    def _require_independent(self, outputs: list[Tensor], dims: list[int]) -> None:
        """Require that the first example's output stays the same if all other examples are replaced by the first."""
        repeated = with_rng(self._rng_state, self._replay, self.inputs.repeat_first())
        first, first_repeated = (
            [tensor.narrow(dim, 0, 1) for tensor, dim in zip(tensors, dims, strict=True) if tensor.dim()]
            for tensors in (outputs, repeated)
        )
        if not all(map(are_close, first, first_repeated)):
            raise ExampleDimensionError(
                f"The output of {type(self.module).__name__} for one example depends on the others in the batch. Keep the "
                "examples in dimension 0 and independent, or freeze its parameters with requires_grad_(False)."
            )

    def _parts(self, grads: list[Tensor | None]) -> Iterator[PerExample]:
        if self.inputs.batch_size == 1:
            yield {name: gradient.unsqueeze(0) for name, gradient in super().gradient(grads).items()}
        if self.inputs.batch_size <= 1:
            return
        indices, cotangents = used_outputs(grads)
        first = with_rng(self._rng_state, self._replay, self.inputs.examples(0, 1))
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
        size = size if self._rng_state is None else 0  # noise is drawn example by example
        yield from in_parts(contributions, select, in_dims, self.inputs.batch_size, size)

    def _batch_dims(self, example: list[Tensor], batch: list[Tensor]) -> list[int]:
        """The batch dimension of each output: the one in which a batch of one differs from the batch."""
        return [_differing_dim(self.module, a.shape, b.shape) for a, b in zip(example, batch, strict=True)]

    def _check_sum(self, grads: list[Tensor | None], sums: Sums) -> dict[str, Tensor]:
        """Require also that the contributions add up to the batch gradient."""
        if self._rng_state is not None:
            return {}  # the batch draws its noise in another order than single examples
        gradient = super()._check_sum(grads, sums)
        # A gradient may be zero except for rounding (a shift before a normalisation), so the largest terms set the scale.
        scale = max(float(square.max()) ** 0.5 for _, square in sums.values())
        for name, grad in gradient.items():
            if not torch.allclose(sums[name][0], grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max()) + 1e-5 * scale):
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
