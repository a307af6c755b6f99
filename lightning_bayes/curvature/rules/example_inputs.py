"""The arguments of a call, split into tensors with a batch dimension and all others."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_bayes.curvature.rules.packed import is_packed
from lightning_bayes.errors import UnsupportedLayerError
from lightning_bayes.private_torch import tree_flatten, tree_unflatten


class ExampleInputs:
    """The arguments of a call as a flat list of leaves, with the batch dimension of each.

    The first tensor defines the batch size. A tensor with another size in that dimension is shared by all examples.

    Args:
        module: The module that is called.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Attributes:
        leaves: The flat list. Its tensors may be replaced by others of the same shape.
        dims: Batch dimension of each leaf, None if all examples share it.
        batch_dim: Batch dimension of the first tensor.
        batch_size: Number of examples.

    Raises:
        UnsupportedLayerError: If an input is a packed sequence, or an attention mask mixes examples and heads.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_layout = isinstance(module, (nn.RNNBase, nn.MultiheadAttention))
        self.batch_dim = 1 if has_layout and not module.batch_first else 0
        self.leaves, self._spec = tree_flatten((args, kwargs), is_leaf=lambda node: isinstance(node, PackedSequence))
        refuse_packed(module, self.leaves)
        known_dims = _known_dims(module, args, kwargs)
        self._possible_dims = [known_dims.get(id(leaf), self.batch_dim) for leaf in self.leaves]
        self._set_batch_size(next(self._sizes(self.leaves), 0))

    def arguments(self, leaves: list[Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rebuild positional and keyword arguments from `leaves`, by default the leaves of the call."""
        args, kwargs = tree_unflatten(self.leaves if leaves is None else leaves, self._spec)
        return args, kwargs

    def examples(self, start: int, count: int) -> list[Any]:
        """The leaves of `count` examples from index `start`."""
        pairs = zip(self.leaves, self.dims, strict=True)
        return [leaf if dim is None else leaf.narrow(dim, start, count) for leaf, dim in pairs]

    def repeat_first(self) -> list[Any]:
        """The leaves of a batch that repeats the first example."""
        pairs = zip(self.leaves, self.dims, strict=True)
        return [leaf if dim is None else leaf.narrow(dim, 0, 1).expand_as(leaf).clone() for leaf, dim in pairs]

    def infer_batch_size(self, outputs: list[Tensor]) -> None:
        """Infer the batch size from the outputs, because a first input of size 1 may be shared by all examples."""
        sizes = set(self._sizes(outputs))
        if len(sizes) == 1 and sizes <= set(self._sizes(self.leaves)):
            self._set_batch_size(sizes.pop())

    def _sizes(self, values: list[Any]) -> Iterator[int]:
        """The batch-dimension size of each tensor that has this dimension."""
        return (size for value in values if (size := _size(value, self.batch_dim)) is not None)

    def _set_batch_size(self, batch_size: int) -> None:
        pairs = zip(self.leaves, self._possible_dims, strict=True)
        self.batch_size = batch_size
        self.dims = tuple(dim if _size(leaf, dim) == batch_size else None for leaf, dim in pairs)


def _size(value: Any, dim: int | None) -> int | None:
    has_dim = dim is not None and isinstance(value, Tensor) and value.dim() > dim
    return value.shape[dim] if has_dim else None


def refuse_packed(module: nn.Module, values: Iterable[Any]) -> None:
    """Raise `UnsupportedLayerError` if an input of the module is a packed sequence."""
    if is_packed(values):
        raise UnsupportedLayerError(
            f"{type(module).__name__} was called with a PackedSequence, whose examples cannot be separated. Pass "
            "padded sequences and exclude the padding from the loss, or freeze the layer with requires_grad_(False)."
        )


def _known_dims(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, int | None]:
    """Batch dimensions, by id, of inputs of torch's layers that may be batched in another dimension than the first input."""
    if not isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return {}
    arguments = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    if isinstance(module, nn.RNNBase):
        return {id(state): 1 for state in tree_flatten(arguments.get("hx"))[0]}
    mask = arguments.get("attn_mask")
    if isinstance(mask, Tensor) and mask.dim() == 3:
        raise UnsupportedLayerError(
            f"{type(module).__name__} was called with an attn_mask of shape {list(mask.shape)}, whose first dimension mixes "
            "examples and heads. Pass a shared mask [length, length], or a key_padding_mask."
        )
    return {id(mask): None, id(arguments.get("key_padding_mask")): 0}
