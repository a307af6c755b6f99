"""The arguments of a call, taken apart into tensors that hold the examples and everything else."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_bayes.errors import UnsupportedLayerError
from lightning_bayes.private_torch import tree_flatten, tree_unflatten


class ExampleInputs:
    """Arguments as a flat list of leaves, with the dimension of each that holds the examples.

    The number of examples is read from the first tensor; a tensor of another size there is shared by all examples.

    Args:
        module: The module that is called.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Attributes:
        leaves: The flat list; tensors in it may be replaced by others of the same shape.
        dims: For each leaf the dimension of the examples, None if all of them share it.
        batch_dim: Where the first tensor holds the examples.
        batch_size: Number of examples.

    Raises:
        UnsupportedLayerError: If the examples are packed.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.batch_dim = 0 if getattr(module, "batch_first", True) else 1
        self.leaves, self._spec = tree_flatten((args, kwargs), is_leaf=lambda node: isinstance(node, PackedSequence))
        refuse_packed(module, self.leaves)
        self._known = _known_dims(module, args, kwargs)
        self._take_apart(next(self._sizes(self.leaves), 0))

    def arguments(self, leaves: list[Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments made of `leaves`, by default those of the call."""
        args, kwargs = tree_unflatten(self.leaves if leaves is None else leaves, self._spec)
        return args, kwargs

    def examples(self, start: int, count: int) -> list[Any]:
        """The leaves of some examples."""
        pairs = zip(self.leaves, self.dims, strict=True)
        return [leaf if dim is None else leaf.narrow(dim, start, count) for leaf, dim in pairs]

    def like_the_first(self) -> list[Any]:
        """The leaves of a batch whose examples all are the first one."""
        pairs = zip(self.leaves, self.dims, strict=True)
        return [leaf if dim is None else leaf.narrow(dim, 0, 1).expand_as(leaf).clone() for leaf, dim in pairs]

    def look_behind_shared(self, outputs: list[Tensor]) -> None:
        """A first input of one row may be one that all examples share: then the outputs have as many rows as another."""
        sizes = set(self._sizes(outputs))
        if len(sizes) == 1 and sizes <= set(self._sizes(self.leaves)):
            self._take_apart(sizes.pop())

    def _sizes(self, values: list[Any]) -> Iterator[int]:
        """The possible numbers of examples, by each of the tensors."""
        return (v.shape[self.batch_dim] for v in values if isinstance(v, Tensor) and v.dim() > self.batch_dim)

    def _take_apart(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.dims = tuple(self._example_dim(leaf, self._known.get(id(leaf), self.batch_dim)) for leaf in self.leaves)

    def _example_dim(self, leaf: Any, dim: int | None) -> int | None:
        if dim is None or not isinstance(leaf, Tensor) or leaf.dim() <= dim or leaf.shape[dim] != self.batch_size:
            return None
        return dim


def refuse_packed(module: nn.Module, values: Iterable[Any]) -> None:
    """Refuse examples that are packed.

    Args:
        module: The module that is called.
        values: Its inputs.

    Raises:
        UnsupportedLayerError: If one of them is packed.
    """
    if any(isinstance(value, PackedSequence) for value in values):
        raise UnsupportedLayerError(
            f"{type(module).__name__} was called with a PackedSequence, whose examples cannot be taken apart. Pass "
            "padded sequences and leave the padding out of the loss, or freeze the layer with requires_grad_(False)."
        )


def _known_dims(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, int | None]:
    """The batch dimension of inputs of torch's own layers that differs from the first input's, by the input's id."""
    if not isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return {}
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    if isinstance(module, nn.RNNBase):
        return {id(state): 1 for state in tree_flatten(given.get("hx"))[0]}
    mask = given.get("attn_mask")
    if isinstance(mask, Tensor) and mask.dim() == 3:
        raise UnsupportedLayerError(
            f"{type(module).__name__} was called with an attn_mask of shape {list(mask.shape)}, whose rows are heads of "
            "examples and cannot be taken apart. Pass a mask [length, length] for all, or a key_padding_mask."
        )
    return {id(mask): None, id(given.get("key_padding_mask")): 0}
