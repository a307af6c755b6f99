"""The generic rule: any module, by `torch.func.vmap` of `torch.func.vjp` of that module alone.

    c_i = (∂ f(x_i; θ) / ∂θ)ᵀ δ_i

Each example is put through the module again as a batch of one. It costs a second forward and holds every c_i, and it is
right wherever examples do not mix: BatchNorm on batch statistics inside the module is refused.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_bayes.curvature.rules.registry import PerExample
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError


class Call:
    """One call of a module: its inputs, taken apart into tensors that hold the examples and everything else.

    Args:
        module: The module; it is called with detached parameters.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Raises:
        UnsupportedLayerError: If examples mix inside the module.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module = module
        self.batch_dim = 0 if getattr(module, "batch_first", True) else 1
        self.leaves, self.spec = tree_flatten((args, kwargs))
        self.batch_size = next((leaf.shape[self.batch_dim] for leaf in self._tensors()), 0)
        self.rng_state = _rng_state() if _draws_noise(module) else None
        mixing = [name or type(module).__name__ for name, child in module.named_modules() if _mixes_examples(child)]
        if mixing:
            raise UnsupportedLayerError(
                f"{type(module).__name__} has no rule of its own, and inside it {', '.join(mixing)} normalises over the "
                "batch, so its examples cannot be taken one by one. Use GroupNorm there, call .eval() on these layers, "
                "or freeze the parameters of the module with requires_grad_(False)."
            )

    def _tensors(self) -> Iterator[Tensor]:
        return (leaf for leaf in self.leaves if isinstance(leaf, Tensor) and leaf.dim() > self.batch_dim)

    def _splits(self, leaf: Any) -> bool:
        return (
            isinstance(leaf, Tensor) and leaf.dim() > self.batch_dim and leaf.shape[self.batch_dim] == self.batch_size
        )

    def run(self, params: dict[str, Tensor], leaves: list[Any]) -> list[Tensor]:
        """Call the module and return its floating-point outputs, flattened."""
        return differentiable(self._call(params, leaves))[0]

    def forward(self, params: dict[str, Tensor]) -> Any:
        """Call the module as its owner would.

        A module that draws noise runs example by example even here, so that backward can repeat the same draws.

        Args:
            params: Detached parameters by name.

        Returns:
            The module's output.
        """
        if self.rng_state is None:
            return self._call(params, self.leaves)
        with torch.no_grad():
            whole = _with_rng(self.rng_state, self._call, params, self.leaves)
        tensors, rebuild = differentiable(whole)
        parts = [self.run(params, self._example(i)) for i in range(self.batch_size)]
        dims = [_differing_dim(self.module, one.shape, out.shape) for one, out in zip(parts[0], tensors, strict=True)]
        return rebuild([torch.cat(pieces, dim) for pieces, dim in zip(zip(*parts, strict=True), dims, strict=True)])

    def _call(self, params: dict[str, Tensor], leaves: list[Any]) -> Any:
        args, kwargs = tree_unflatten(leaves, self.spec)
        return torch.func.functional_call(self.module, params, args, kwargs)

    def _example(self, index: int) -> list[Any]:
        """The inputs of one example, as a batch of one."""
        return [leaf.narrow(self.batch_dim, index, 1) if self._splits(leaf) else leaf for leaf in self.leaves]

    def per_example(self, params: dict[str, Tensor], grads: list[Tensor | None]) -> PerExample:
        """Every example's contribution to every parameter.

        Args:
            params: Detached parameters by name.
            grads: Gradient with respect to each floating-point output; None where nothing depends on it.

        Returns:
            Contributions by parameter name, ``[B, *shape]``.
        """
        used = [i for i, grad in enumerate(grads) if grad is not None]
        cotangents = [grad for grad in grads if grad is not None]
        dims = self._example_dims(params, cotangents, used)

        def one(gradients: list[Tensor], leaves: list[Any]) -> PerExample:
            vjp = torch.func.vjp(lambda p: [self.run(p, leaves)[i] for i in used], params)[1]
            contribution: PerExample = vjp(gradients)[0]
            return contribution

        if self.rng_state is None:
            with contextlib.suppress(RuntimeError), warnings.catch_warnings():  # recurrent layers have no batching rule
                warnings.filterwarnings("ignore", "There is a performance drop")  # right, only slow
                return self._vectorised(one, cotangents, dims)
        return self._looped(one, cotangents, dims)

    def _vectorised(self, one: Callable[..., PerExample], grads: list[Tensor], dims: list[int]) -> PerExample:
        def with_batch_of_one(gradients: list[Tensor], *leaves: Any) -> PerExample:
            split = [
                leaf.unsqueeze(self.batch_dim) if self._splits(full) else leaf
                for leaf, full in zip(leaves, self.leaves, strict=True)
            ]
            return one([g.unsqueeze(d) for g, d in zip(gradients, dims, strict=True)], split)

        in_dims = tuple(self.batch_dim if self._splits(leaf) else None for leaf in self.leaves)
        result: PerExample = torch.vmap(with_batch_of_one, (dims, *in_dims))(grads, *self.leaves)
        return result

    def _looped(self, one: Callable[..., PerExample], grads: list[Tensor], dims: list[int]) -> PerExample:
        def all_examples() -> list[PerExample]:
            return [
                one([g.narrow(d, i, 1) for g, d in zip(grads, dims, strict=True)], self._example(i))
                for i in range(self.batch_size)
            ]

        each = _with_rng(self.rng_state, all_examples)
        return {name: torch.stack([example[name] for example in each]) for name in each[0]}

    def _example_dims(self, params: dict[str, Tensor], grads: list[Tensor], used: list[int]) -> list[int]:
        """In which dimension each output holds the examples: where a batch of one differs from the batch."""
        outputs = _with_rng(self.rng_state, self.run, params, self._example(0))
        return [_differing_dim(self.module, outputs[i].shape, g.shape) for i, g in zip(used, grads, strict=True)]

    def check_sum(self, params: dict[str, Tensor], grads: list[Tensor | None], found: PerExample) -> None:
        """Compare the sum of the contributions with the gradient of the whole batch.

        Args:
            params: Detached parameters by name.
            grads: Gradients with respect to the outputs, as in `per_example`.
            found: What `per_example` returned.

        Raises:
            ExampleDimensionError: If they differ: the module mixes examples, or keeps them in another dimension.
        """
        if self.rng_state is not None:
            return  # the batch draws its noise in another order than the examples do
        used = [i for i, grad in enumerate(grads) if grad is not None]
        vjp = torch.func.vjp(lambda p: [self.run(p, self.leaves)[i] for i in used], params)[1]
        for name, grad in vjp([grads[i] for i in used])[0].items():
            if not torch.allclose(found[name].sum(0), grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max())):
                raise ExampleDimensionError(
                    f"The per-example gradients of {type(self.module).__name__}.{name} do not add up to its gradient, "
                    f"so it mixes examples or does not keep them in dimension {self.batch_dim}. Give it batch-first "
                    "inputs, write a rule for it (see curvature/rules/linear.py), or freeze it."
                )


def differentiable(output: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """Take the floating-point tensors out of `output`.

    Args:
        output: A tensor or any nest of tuples, lists and dictionaries.

    Returns:
        These tensors, and a function that puts replacements for them back.
    """
    leaves, spec = tree_flatten(output)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    def rebuild(replacements: list[Tensor]) -> Any:
        new = dict(zip(places, replacements, strict=True))
        return tree_unflatten([new.get(i, leaf) for i, leaf in enumerate(leaves)], spec)

    return [leaves[i] for i in places], rebuild


def _differing_dim(module: nn.Module, one: torch.Size, batch: torch.Size) -> int:
    different = [d for d, (a, b) in enumerate(zip(one, batch, strict=True)) if a != b]
    if len(different) > 1:
        raise ExampleDimensionError(
            f"{type(module).__name__} turns one example into {tuple(one)} but a batch into {tuple(batch)}: its output "
            "does not hold the examples in one dimension. Write a rule for it, or freeze it."
        )
    return different[0] if different else 0


def _rng_state() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


def _with_rng(state: list[Tensor] | None, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` with the random numbers that the forward pass drew, and leave the global generators alone."""
    if state is None:
        return function(*args)
    with torch.random.fork_rng():
        torch.set_rng_state(state[0])
        if len(state) > 1:
            torch.cuda.set_rng_state_all(state[1:])
        return function(*args)


def _draws_noise(module: nn.Module) -> bool:
    return any(
        child.training and (getattr(child, "dropout", 0.0) or getattr(child, "p", 0.0)) not in (0, 0.0)
        for child in module.modules()
        if isinstance(child, (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase))
    )


def _mixes_examples(module: nn.Module) -> bool:
    is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_batch_norm and (module.training or module.running_mean is None)
