"""The generic rule: any module, by `torch.func.vmap` of `torch.func.vjp` of that module alone.

    c_i = (∂ f(x_i; θ) / ∂θ)ᵀ δ_i

Each example is put through the module again as a batch of one, with the buffers and random numbers of the forward. It
costs a second forward, holds as many c_i at once as fit the workspace, and is right wherever examples do not mix. A module
with BatchNorm inside is measured by `whole_batch`.
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
from lightning_bayes.curvature.rules.replayed_call import ReplayedCall, are_close, refused_by_name
from lightning_bayes.curvature.rules.stateless import call_with
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError


class SingleExamples(ReplayedCall):
    """A call that is repeated for single examples."""

    def forward(self, params: dict[str, Tensor], is_checked: Callable[[], bool] = lambda: True) -> Any:
        """See `ReplayedCall.forward`. A module that draws noise runs example by example, so that backward can repeat it."""
        before = rng_state()
        output = call_with(self.module, params, *self.inputs.arguments())
        tensors, rebuild = differentiable(output)
        if self.inputs.batch_size == 1:
            self.inputs.look_behind_shared(tensors)
        draws_noise = bool(self.inputs.batch_size) and not same_rng(before, rng_state())
        if draws_noise:
            self._rng_state = before
            set_rng(before)
            tensors = self._one_by_one(params, tensors, is_checked())
        if not is_checked():
            self.keep_for_check(tensors)
        return rebuild(tensors) if draws_noise else output

    def _one_by_one(self, params: dict[str, Tensor], whole: list[Tensor], is_checked: bool) -> list[Tensor]:
        """The outputs of the examples, each a batch of one."""
        parts = [self.replay(params, self.inputs.examples(i, 1)) for i in range(self.inputs.batch_size)]
        dims = [_differing_dim(self.module, one.shape, out.shape) for one, out in zip(parts[0], whole, strict=True)]
        if not is_checked:
            self._require_apart(params, whole, dims)
        return [torch.cat(pieces, dim) for pieces, dim in zip(zip(*parts, strict=True), dims, strict=True)]

    @torch.no_grad()
    def _require_apart(self, params: dict[str, Tensor], outputs: list[Tensor], dims: list[int]) -> None:
        """Require of a module with noise that the first example's output stays when the others become like the first."""
        again = with_rng(self._rng_state, self.replay, params, self.inputs.like_the_first())
        firsts = ([t.narrow(dim, 0, 1) for t, dim in zip(ts, dims, strict=True) if t.dim()] for ts in (outputs, again))
        if not all(map(are_close, *firsts)):
            raise ExampleDimensionError(
                f"The output of {type(self.module).__name__} for one example depends on the others in the batch. Give it "
                "examples in dimension 0 that do not mix, or freeze its parameters with requires_grad_(False)."
            )

    def gradient(self, params: dict[str, Tensor], grads: list[Tensor | None]) -> dict[str, Tensor]:
        """See `ReplayedCall.gradient`; noise, which the examples drew one by one, is an `UnsupportedLayerError`."""
        if self._rng_state is not None:
            raise UnsupportedLayerError(
                f"{type(self.module).__name__} has no rule of its own, draws noise, and examples share its output. Call it "
                "with the batch in dimension 0, or freeze its parameters with requires_grad_(False)."
            )
        used = [i for i, grad in enumerate(grads) if grad is not None]
        vjp = torch.func.vjp(lambda p: [self.replay(p, self.inputs.leaves)[i] for i in used], params)[1]
        found: dict[str, Tensor] = vjp([grads[i] for i in used])[0]
        return found

    def _visit(
        self, params: dict[str, Tensor], grads: list[Tensor | None], visit: Callable[[PerExample], None]
    ) -> None:
        """Call `visit` with the contributions of some examples at a time, in order."""
        if not self.inputs.batch_size:
            return None
        used = [i for i, grad in enumerate(grads) if grad is not None]
        cotangents = [grad for grad in grads if grad is not None]

        def one(gradients: list[Tensor], leaves: list[Any]) -> PerExample:
            vjp = torch.func.vjp(lambda p: [self.replay(p, leaves)[i] for i in used], params)[1]
            contribution: PerExample = vjp(gradients)[0]
            return contribution

        with refused_by_name(self.module):
            if self.inputs.batch_size == 1:  # nothing to take apart
                found = with_rng(self._rng_state, one, cotangents, self.inputs.leaves)
                return visit({name: contribution.unsqueeze(0) for name, contribution in found.items()})
            dims = self._output_dims(params, cotangents, used)
            size = self.workspace.examples_at_once(sum(p.numel() for p in params.values()))
            if self._rng_state is not None or not self._vectorised(one, cotangents, dims, size, visit):
                with_rng(self._rng_state, self._looped, one, cotangents, dims, visit)
        return None

    def _vectorised(
        self,
        one: Callable[..., PerExample],
        grads: list[Tensor],
        dims: list[int],
        size: int,
        visit: Callable[[PerExample], None],
    ) -> bool:
        """Visit `size` examples at a time; False if `torch.vmap` cannot do the first of them."""
        in_dims, batch_size = list(self.inputs.dims), self.inputs.batch_size

        def with_batch_of_one(gradients: list[Tensor], *leaves: Any) -> PerExample:
            pairs = zip(leaves, in_dims, strict=True)
            split = [leaf if dim is None else leaf.unsqueeze(dim) for leaf, dim in pairs]
            return one([g.unsqueeze(d) for g, d in zip(gradients, dims, strict=True)], split)

        def some(start: int) -> PerExample:
            count = min(size, batch_size - start)
            gradients = [g.narrow(d, start, count) for g, d in zip(grads, dims, strict=True)]
            result: PerExample = torch.vmap(with_batch_of_one, (dims, *in_dims))(
                gradients, *self.inputs.examples(start, count)
            )
            return result

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # right, only slow
            try:
                first = some(0)
            except RuntimeError:  # recurrent layers, for instance, have no batching rule
                return False
            visit(first)
            for start in range(size, batch_size, size):
                visit(some(start))
        return True

    def _looped(
        self, one: Callable[..., PerExample], grads: list[Tensor], dims: list[int], visit: Callable[[PerExample], None]
    ) -> None:
        for i in range(self.inputs.batch_size):
            found = one([g.narrow(d, i, 1) for g, d in zip(grads, dims, strict=True)], self.inputs.examples(i, 1))
            visit({name: contribution.unsqueeze(0) for name, contribution in found.items()})

    def _output_dims(self, params: dict[str, Tensor], grads: list[Tensor], used: list[int]) -> list[int]:
        """The dimension of the examples in each output: the one where a batch of one differs from the batch."""
        outputs = with_rng(self._rng_state, self.replay, params, self.inputs.examples(0, 1))
        return [_differing_dim(self.module, outputs[i].shape, g.shape) for i, g in zip(used, grads, strict=True)]

    def check_sum(self, params: dict[str, Tensor], grads: list[Tensor | None], found: Sums) -> None:
        """Compare the sum of the contributions with the gradient of the whole batch; see also `ReplayedCall.require_same`.

        Args:
            params: Detached parameters by name.
            grads: Gradients with respect to the outputs, as in `per_example`.
            found: The result of `sums`.

        Raises:
            ExampleDimensionError: If they differ: the module mixes examples, or keeps them in another dimension.
        """
        if self._rng_state is not None:
            return  # the batch draws its noise in another order than the examples do
        used = [i for i, grad in enumerate(grads) if grad is not None]
        again, vjp, *_ = torch.func.vjp(lambda p: [self.replay(p, self.inputs.leaves)[i] for i in used], params)
        self.require_same(again, used)
        # A gradient may be zero except for rounding (of a shift before a normalisation), so the largest terms set the scale.
        scale = max(float(square.max()) ** 0.5 for _, square in found.values())
        for name, grad in vjp([grads[i] for i in used])[0].items():
            if not torch.allclose(found[name][0], grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max()) + 1e-5 * scale):
                raise ExampleDimensionError(
                    f"The per-example gradients of {type(self.module).__name__}.{name} do not add up to its gradient, so "
                    f"it mixes examples or does not keep them in dimension {self.inputs.batch_dim}. Give it batch-first "
                    "inputs, write a rule for it (see curvature/rules/linear.py), or freeze it."
                )


def _differing_dim(module: nn.Module, one: torch.Size, batch: torch.Size) -> int:
    different = [d for d, (a, b) in enumerate(zip(one, batch, strict=True)) if a != b]
    if len(different) > 1:
        raise ExampleDimensionError(
            f"{type(module).__name__} turns one example into {tuple(one)} but a batch into {tuple(batch)}: its output "
            "does not hold the examples in one dimension. Write a rule for it, or freeze it."
        )
    return different[0] if different else 0
