"""The generic rule: any module, by `torch.func.vmap` of `torch.func.vjp` of that module alone.

    c_i = (∂ f(x_i; θ) / ∂θ)ᵀ δ_i

Each example is put through the module again as a batch of one, with the buffers and random numbers of the forward. It
costs a second forward, holds as many c_i at once as fit the workspace, and is right wherever examples do not
mix: BatchNorm on batch statistics inside the module is refused.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.batch_norm import uses_batch_statistics
from lightning_bayes.curvature.rules.example_inputs import ExampleInputs
from lightning_bayes.curvature.rules.pytree import differentiable
from lightning_bayes.curvature.rules.random_numbers import rng_state, same_rng, set_rng, with_rng
from lightning_bayes.curvature.rules.registry import PerExample, Sums, add_sums
from lightning_bayes.curvature.rules.stateless import call_with, without_trace
from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError

_HALF = {torch.float16, torch.bfloat16}


class ReplayedCall:
    """One call of a module, which can be repeated for single examples.

    Args:
        module: The module; it is called with detached parameters.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        workspace: Says how many examples are taken at once.

    Attributes:
        inputs: The arguments, taken apart.
        buffers: The module's buffers before the forward, by name.
        frozen: Parameters that replays take from here, not from the module.

    Raises:
        UnsupportedLayerError: If examples mix inside the module, or are packed.
    """

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], workspace: Workspace | None = None
    ) -> None:
        self.module, self.workspace = module, workspace or Workspace()
        self.inputs = ExampleInputs(module, args, kwargs)
        _require_no_batch_statistics(module)
        self.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self.frozen: dict[str, Tensor] = {}
        self._rng_state: list[Tensor] | None = None  # that of the forward, if the module draws noise
        self._outputs: list[Tensor] | None = None  # those of the forward, until they were checked

    def forward(self, params: dict[str, Tensor], is_checked: Callable[[], bool] = lambda: True) -> Any:
        """Call the module as its owner would.

        A module that draws noise runs example by example even here, so that backward can repeat the same draws.

        Args:
            params: Detached parameters by name.
            is_checked: Whether calls like this one are known not to mix examples.

        Returns:
            The module's output.
        """
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
            self._keep_for_check(tensors)
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
        if not all(map(_are_close, *firsts)):
            raise ExampleDimensionError(
                f"The output of {type(self.module).__name__} for one example depends on the others in the batch. Give it "
                "examples in dimension 0 that do not mix, or freeze its parameters with requires_grad_(False)."
            )

    def _keep_for_check(self, outputs: list[Tensor]) -> None:
        """Keep the forward's outputs for `check_sum`, unless they are rounded to half precision."""
        tensors = [*outputs, *self.module.parameters()]
        if not any(t.dtype in _HALF or torch.is_autocast_enabled(t.device.type) for t in tensors):
            self._outputs = [output.detach() for output in outputs]

    def replay(self, params: dict[str, Tensor], leaves: list[Any]) -> list[Tensor]:
        """Call the module with the forward's buffers; return its floating-point outputs, flattened."""
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}  # the module may change them
        with without_trace(self.module):
            output = call_with(self.module, {**buffers, **self.frozen, **params}, *self.inputs.arguments(leaves))
        return differentiable(output)[0]

    def per_example(self, params: dict[str, Tensor], grads: list[Tensor | None]) -> PerExample:
        """Every example's contribution to every parameter.

        Args:
            params: Detached parameters by name.
            grads: Gradient with respect to each floating-point output; None where nothing depends on it.

        Returns:
            Contributions by parameter name, ``[B, *shape]``.
        """
        parts: list[PerExample] = []
        self._visit(params, grads, parts.append)
        return {
            name: torch.cat([p.new_zeros(0, *p.shape), *(part[name] for part in parts)]) for name, p in params.items()
        }

    def gradient(self, params: dict[str, Tensor], grads: list[Tensor | None]) -> dict[str, Tensor]:
        """The gradient of the whole call.

        Args:
            params: Detached parameters by name.
            grads: As in `per_example`.

        Returns:
            The gradient by parameter name.

        Raises:
            UnsupportedLayerError: If the module draws noise, which its examples did one by one.
        """
        if self._rng_state is not None:
            raise UnsupportedLayerError(
                f"{type(self.module).__name__} has no rule of its own, draws noise, and examples share its output. Call it "
                "with the batch in dimension 0, or freeze its parameters with requires_grad_(False)."
            )
        used = [i for i, grad in enumerate(grads) if grad is not None]
        vjp = torch.func.vjp(lambda p: [self.replay(p, self.inputs.leaves)[i] for i in used], params)[1]
        found: dict[str, Tensor] = vjp([grads[i] for i in used])[0]
        return found

    def sums(self, params: dict[str, Tensor], grads: list[Tensor | None]) -> Sums:
        """Sums of contributions and of their squares, without ever holding all contributions.

        Args:
            params: Detached parameters by name.
            grads: As in `per_example`.

        Returns:
            Both sums by parameter name.
        """
        total: Sums = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in params.items()}

        def add(part: PerExample) -> None:
            for name, contribution in part.items():
                add_sums(total, name, contribution.clone())  # contributions may be views of one another

        self._visit(params, grads, add)
        return total

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

        with _refused_by_name(self.module):
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
        """In which dimension each output holds the examples: where a batch of one differs from the batch."""
        outputs = with_rng(self._rng_state, self.replay, params, self.inputs.examples(0, 1))
        return [_differing_dim(self.module, outputs[i].shape, g.shape) for i, g in zip(used, grads, strict=True)]

    def check_sum(self, params: dict[str, Tensor], grads: list[Tensor | None], found: Sums) -> None:
        """Compare the sum of the contributions with the gradient of the whole batch.

        Args:
            params: Detached parameters by name.
            grads: Gradients with respect to the outputs, as in `per_example`.
            found: What `sums` returned.

        Raises:
            ExampleDimensionError: If they differ: the module mixes examples, or keeps them in another dimension.
            UnsupportedLayerError: If the module called again returns something else.
        """
        if self._rng_state is not None:
            return  # the batch draws its noise in another order than the examples do
        used = [i for i, grad in enumerate(grads) if grad is not None]
        again, vjp, *_ = torch.func.vjp(lambda p: [self.replay(p, self.inputs.leaves)[i] for i in used], params)
        kept, self._outputs = self._outputs, None
        if kept is not None and not all(map(_are_close, (kept[i] for i in used), again)):
            raise UnsupportedLayerError(
                f"{type(self.module).__name__} has no rule of its own, and called again with the same inputs it returns "
                "something else: it keeps a state outside of its buffers. Hold the state in buffers, or change it outside "
                "of forward; or freeze the parameters of the module with requires_grad_(False)."
            )
        # A gradient may be zero but for rounding (of a shift before a normalisation), so the largest terms set the scale.
        scale = max(float(square.max()) ** 0.5 for _, square in found.values())
        for name, grad in vjp([grads[i] for i in used])[0].items():
            if not torch.allclose(found[name][0], grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max()) + 1e-5 * scale):
                raise ExampleDimensionError(
                    f"The per-example gradients of {type(self.module).__name__}.{name} do not add up to its gradient, so "
                    f"it mixes examples or does not keep them in dimension {self.inputs.batch_dim}. Give it batch-first "
                    "inputs, write a rule for it (see curvature/rules/linear.py), or freeze it."
                )


def _are_close(one: Tensor, other: Tensor) -> bool:
    scale = float(one.abs().nan_to_num(posinf=0.0).max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


def _require_no_batch_statistics(module: nn.Module) -> None:
    kind = type(module).__name__
    mixing = [name or kind for name, child in module.named_modules() if uses_batch_statistics(child)]
    if mixing:
        inside = "it" if mixing == [kind] else f"inside it {', '.join(mixing)}"
        raise UnsupportedLayerError(
            f"{kind} has no rule of its own, and {inside} normalises over the batch, so its examples cannot be taken one by "
            "one. Use GroupNorm there, call .eval() on these layers, or freeze the parameters of the module with "
            "requires_grad_(False)."
        )


@contextlib.contextmanager
def _refused_by_name(module: nn.Module) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UnsupportedLayerError(
            f"{type(module).__name__} has no rule of its own, and cannot be run for one example at a time: {error} Write a "
            "rule for it (see curvature/rules/linear.py), move the parameters that it holds itself into a small module, or "
            "freeze them with requires_grad_(False). Activation checkpointing belongs around such a module, not inside."
        ) from error


def _differing_dim(module: nn.Module, one: torch.Size, batch: torch.Size) -> int:
    different = [d for d, (a, b) in enumerate(zip(one, batch, strict=True)) if a != b]
    if len(different) > 1:
        raise ExampleDimensionError(
            f"{type(module).__name__} turns one example into {tuple(one)} but a batch into {tuple(batch)}: its output "
            "does not hold the examples in one dimension. Write a rule for it, or freeze it."
        )
    return different[0] if different else 0
