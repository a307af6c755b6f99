"""Strict loading of weights into a model. An error lists every misfit; only the head may be replaced."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_bayes.errors import WeightsError

_COUNTER = "num_batches_tracked"  # of BatchNorm; files from before torch 0.4.1 lack it, and no prediction needs it


def load_weights(
    model: nn.Module, state: Mapping[str, Tensor], source: str = "The state dict", replace_head: bool | None = None
) -> None:
    """Load a state dict into a model, in place.

    Args:
        model: The model.
        state: Tensors by name.
        source: Name of the state dict in messages.
        replace_head: Whether the last layer keeps the values it has. None: it does if the state dict has another
            number of classes, with a message; False: the number of classes must be the same.

    Raises:
        WeightsError: If the state dict does not fit or holds values that are not finite. It lists all names that are
            missing, unexpected, of another shape or type, or not finite; the model is not changed.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> load_weights(model, {"weight": torch.ones(3, 2), "bios": torch.ones(3)})
        Traceback (most recent call last):
        ...
        lightning_bayes.errors.WeightsError: The state dict does not fit Linear (missing: bias; unexpected: bios). ...
    """
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    head = {name for name in own if _is_part(name, head_name(model))}
    replaced = head if replace_head or (replace_head is None and _has_other_classes(own, state, head)) else set()
    wanted = {name: value for name, value in own.items() if name not in replaced}
    given = {name: value for name, value in state.items() if name not in replaced}
    misfits = "; ".join(f"{what}: {', '.join(names)}" for what, names in _misfits(wanted, given).items() if names)
    if misfits:
        raise WeightsError(
            f"{source} does not fit {type(model).__name__} ({misfits}). Build the model with the name and the arguments "
            "that the weights were trained with."
        )
    model.load_state_dict(given, strict=False)  # the keys have been compared above
    if replaced:
        rank_zero_info(
            f"{source}: the head ({', '.join(sorted(replaced))}) is not taken over; it starts from random values."
        )


def head_name(model: nn.Module) -> tuple[str, ...]:
    """The layers that give the logits.

    Args:
        model: A model. timm's models name this layer; for others it is the last linear one.

    Returns:
        Names of layers; the empty name if the model itself is a linear layer.

    Raises:
        WeightsError: If there is no linear layer.

    Example:
        >>> head_name(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3)))
        ('2',)
    """
    config = getattr(model, "pretrained_cfg", None)
    named = config.get("classifier") if isinstance(config, Mapping) else None
    if named:
        return (named,) if isinstance(named, str) else tuple(named)
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise WeightsError(f"{type(model).__name__} has no linear layer that could be its head.")
    return (linear[-1],)


def _is_part(name: str, layers: tuple[str, ...]) -> bool:
    return any(name.startswith(f"{layer}.") if layer else True for layer in layers)


def _has_other_classes(own: Mapping[str, Tensor], given: Mapping[str, Tensor], head: set[str]) -> bool:
    """Whether the head differs in dimension 0 alone, the classes."""
    pairs = [(own[name].shape, given[name].shape) for name in head if name in given]
    if len(pairs) < len(head) or not all(ours and theirs for ours, theirs in pairs):
        return False
    return all(ours[1:] == theirs[1:] and ours[0] != theirs[0] for ours, theirs in pairs)


def _misfits(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, list[str]]:
    shared = [name for name in wanted if name in given]
    strange = [name for name in shared if _is_of_another_type(wanted[name], given[name])]
    return {
        "missing": [name for name in wanted if name not in given and not name.endswith(_COUNTER)],
        "unexpected": [name for name in given if name not in wanted],
        "of another shape": [
            f"{name} {list(given[name].shape)} instead of {list(wanted[name].shape)}"
            for name in shared
            if given[name].shape != wanted[name].shape
        ],
        "of another type": [f"{name} {_type_of(given[name])}" for name in strange],
        "not finite": [name for name in shared if name not in strange and not torch.isfinite(given[name]).all()],
    }


def _is_of_another_type(ours: Tensor, theirs: Tensor) -> bool:
    """Whether copying would lose values, or there are none to copy; the number of bits does not matter."""
    same_numbers = ours.is_complex() == theirs.is_complex() and ours.is_floating_point() == theirs.is_floating_point()
    return not same_numbers or theirs.layout != torch.strided or theirs.is_meta


def _type_of(value: Tensor) -> str:
    parts = [str(value.dtype), str(value.layout) if value.layout != torch.strided else "", "meta" * value.is_meta]
    return " ".join(part.removeprefix("torch.") for part in parts if part)
