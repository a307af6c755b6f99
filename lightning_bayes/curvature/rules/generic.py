"""The generic rule for any module: `torch.func.vmap` of `torch.func.vjp` of that module alone.

    c_i = (∂ f(x_i; θ) / ∂θ)ᵀ δ_i

Each example runs through the module again as a batch of one, with the buffers and random numbers of the forward. The rule
costs a second forward, stores as many c_i at once as fit the workspace, and is exact for modules that do not mix examples.
`whole_batch` handles modules that contain BatchNorm.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.pytree import differentiable
from lightning_bayes.curvature.rules.random_numbers import rng_state, same_rng, set_rng, with_rng
from lightning_bayes.curvature.rules.registry import PerExample, Sums
from lightning_bayes.curvature.rules.replayed_call import ReplayedCall, are_close, refused_by_name, used_outputs
from lightning_bayes.curvature.rules.stateless import call_with
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError


class SingleExamples(ReplayedCall):
    """A call that is repeated for single examples."""

    def forward(self, params: dict[str, Tensor], is_checked: Callable[[], bool] = lambda: True) -> Any:
        """See `ReplayedCall.forward`. A module with noise runs example by example, so that backward can repeat the noise."""
        state_before = rng_state()
        output = call_with(self.module, params, *self.inputs.arguments())
        tensors, rebuild = differentiable(output)
        if self.inputs.batch_size == 1:
            self.inputs.infer_batch_size(tensors)
        draws_noise = bool(self.inputs.batch_size) and not same_rng(state_before, rng_state())
        if draws_noise:
            self._rng_state = state_before
            set_rng(state_before)
            tensors = self._one_by_one(params, tensors, is_checked())
        if not is_checked():
            self.keep_for_check(tensors)
        return rebuild(tensors) if draws_noise else output

    def _one_by_one(self, params: dict[str, Tensor], outputs: list[Tensor], is_checked: bool) -> list[Tensor]:
        """Compute the outputs in batches of one, given the outputs of the whole batch."""
        parts = [self.replay(params, self.inputs.examples(i, 1)) for i in range(self.inputs.batch_size)]
        dims = [_differing_dim(self.module, one.shape, out.shape) for one, out in zip(parts[0], outputs, strict=True)]
        if not is_checked:
            self._require_independent(params, outputs, dims)
        return [torch.cat(pieces, dim) for pieces, dim in zip(zip(*parts, strict=True), dims, strict=True)]

    @torch.no_grad()
    def _require_independent(self, params: dict[str, Tensor], outputs: list[Tensor], dims: list[int]) -> None:
        """Require that the first example's output stays the same if all other examples are replaced by the first."""
        repeated = with_rng(self._rng_state, self.replay, params, self.inputs.repeat_first())
        first, first_repeated = (
            [tensor.narrow(dim, 0, 1) for tensor, dim in zip(tensors, dims, strict=True) if tensor.dim()]
            for tensors in (outputs, repeated)
        )
        if not all(map(are_close, first, first_repeated)):
            raise ExampleDimensionError(
                f"The output of {type(self.module).__name__} for one example depends on the others in the batch. Keep the "
                "examples in dimension 0 and independent, or freeze its parameters with requires_grad_(False)."
            )

    def gradient(self, params: dict[str, Tensor], grads: list[Tensor | None]) -> dict[str, Tensor]:
        """See `ReplayedCall.gradient`. Raises `UnsupportedLayerError` for a module with noise."""
        if self._rng_state is not None:
            raise UnsupportedLayerError(
                f"{type(self.module).__name__} has no curvature rule, draws noise, and examples share its output. Call it "
                "with the batch in dimension 0, or freeze its parameters with requires_grad_(False)."
            )
        return super().gradient(params, grads)

    def _visit(
        self, params: dict[str, Tensor], grads: list[Tensor | None], visit: Callable[[PerExample], None]
    ) -> None:
        if not self.inputs.batch_size:
            return
        indices, cotangents = used_outputs(grads)

        def contribution(example_grads: list[Tensor], leaves: list[Any]) -> PerExample:
            pull_back = torch.func.vjp(lambda p: [self.replay(p, leaves)[i] for i in indices], params)[1]
            gradient: PerExample = pull_back(example_grads)[0]
            return gradient

        with refused_by_name(self.module):
            if self.inputs.batch_size == 1:
                gradient = with_rng(self._rng_state, contribution, cotangents, self.inputs.leaves)
                visit({name: value.unsqueeze(0) for name, value in gradient.items()})
                return
            dims = self._output_dims(params, cotangents, indices)
            size = self.workspace.examples_at_once(sum(p.numel() for p in params.values()))
            if self._rng_state is not None or not self._vectorised(contribution, cotangents, dims, size, visit):
                with_rng(self._rng_state, self._looped, contribution, cotangents, dims, visit)

    def _vectorised(
        self,
        contribution: Callable[..., PerExample],
        grads: list[Tensor],
        dims: list[int],
        size: int,
        visit: Callable[[PerExample], None],
    ) -> bool:
        """Visit `size` examples at a time; return False if `torch.vmap` fails for the first of them."""
        in_dims, batch_size = list(self.inputs.dims), self.inputs.batch_size

        def with_batch_of_one(example_grads: list[Tensor], *leaves: Any) -> PerExample:
            pairs = zip(leaves, in_dims, strict=True)
            batched = [leaf if dim is None else leaf.unsqueeze(dim) for leaf, dim in pairs]
            return contribution([g.unsqueeze(d) for g, d in zip(example_grads, dims, strict=True)], batched)

        def contributions(start: int) -> PerExample:
            count = min(size, batch_size - start)
            part_grads = [g.narrow(d, start, count) for g, d in zip(grads, dims, strict=True)]
            leaves = self.inputs.examples(start, count)
            result: PerExample = torch.vmap(with_batch_of_one, (dims, *in_dims))(part_grads, *leaves)
            return result

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # correct, only slow
            try:
                first = contributions(0)
            except RuntimeError:  # recurrent layers, for example, have no batching rule
                return False
            visit(first)
            for start in range(size, batch_size, size):
                visit(contributions(start))
        return True

    def _looped(
        self,
        contribution: Callable[..., PerExample],
        grads: list[Tensor],
        dims: list[int],
        visit: Callable[[PerExample], None],
    ) -> None:
        for i in range(self.inputs.batch_size):
            example_grads = [g.narrow(d, i, 1) for g, d in zip(grads, dims, strict=True)]
            gradient = contribution(example_grads, self.inputs.examples(i, 1))
            visit({name: value.unsqueeze(0) for name, value in gradient.items()})

    def _output_dims(self, params: dict[str, Tensor], grads: list[Tensor], indices: list[int]) -> list[int]:
        """The batch dimension of each output: the one in which a batch of one differs from the batch."""
        outputs = with_rng(self._rng_state, self.replay, params, self.inputs.examples(0, 1))
        return [_differing_dim(self.module, outputs[i].shape, g.shape) for i, g in zip(indices, grads, strict=True)]

    def check_sum(self, params: dict[str, Tensor], grads: list[Tensor | None], sums: Sums) -> None:
        """Require that a repeated call returns the same outputs, and that the contributions add up to the batch gradient."""
        if self._rng_state is not None:
            return  # the batch draws its noise in another order than single examples
        indices, cotangents = used_outputs(grads)
        repeated, pull_back = self.vjp(params, indices)
        self.require_same(repeated, indices)
        # A gradient may be zero except for rounding (a shift before a normalisation), so the largest terms set the scale.
        scale = max(float(square.max()) ** 0.5 for _, square in sums.values())
        for name, grad in pull_back(cotangents)[0].items():
            if not torch.allclose(sums[name][0], grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max()) + 1e-5 * scale):
                raise ExampleDimensionError(
                    f"The per-example gradients of {type(self.module).__name__}.{name} do not add up to its gradient. The "
                    f"module mixes examples, or has them in another dimension than {self.inputs.batch_dim}. Use batch-first "
                    "inputs, write a rule for it (see curvature/rules/linear.py), or freeze it."
                )


def _differing_dim(module: nn.Module, one: torch.Size, batch: torch.Size) -> int:
    dims = [dim for dim, (a, b) in enumerate(zip(one, batch, strict=True)) if a != b]
    if len(dims) > 1:
        raise ExampleDimensionError(
            f"{type(module).__name__} returns {tuple(one)} for one example but {tuple(batch)} for a batch: its output has "
            "no single batch dimension. Write a rule for it, or freeze it."
        )
    return dims[0] if dims else 0
