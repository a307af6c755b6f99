"""Strict loading of weights into a model. An error lists every mismatch; only the head may be replaced."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_bayes.errors import WeightsError

_COUNTER = "num_batches_tracked"  # BatchNorm counter: missing in files from before torch 0.4.1, unused in prediction


def load_weights(
    model: nn.Module, state: Mapping[str, Tensor], source: str = "The state dict", replace_head: bool | None = None
) -> None:
    """Load a state dict into a model, in place.

    Args:
        model: The model.
        state: Tensors by name.
        source: Name of the state dict in messages.
        replace_head: Whether the last layer keeps its current values. None keeps them, with a message, if the state dict has
            a different number of classes. False requires the same number of classes.

    Raises:
        WeightsError: If the state dict does not fit or has non-finite values. The error lists all tensors that are missing,
            unexpected, of the wrong shape or type, or not finite. The model is left unchanged.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> load_weights(model, {"weight": torch.ones(3, 2), "bios": torch.ones(3)})
        Traceback (most recent call last):
        ...
        lightning_bayes.errors.WeightsError: The state dict does not fit Linear (missing: bias; unexpected: bios). ...
    """
    current = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    head = {name for name in current if _is_part(name, head_name(model))}
    if replace_head is None:
        replace_head = _has_other_classes(current, state, head)
    skipped = head if replace_head else set()
    expected = {name: value for name, value in current.items() if name not in skipped}
    loaded = {name: value for name, value in state.items() if name not in skipped}
    mismatches = [f"{problem}: {', '.join(names)}" for problem, names in _mismatches(expected, loaded).items() if names]
    if mismatches:
        raise WeightsError(
            f"{source} does not fit {type(model).__name__} ({'; '.join(mismatches)}). Build the model with the name and "
            "arguments that the weights were trained with."
        )
    model.load_state_dict(loaded, strict=False)  # the keys have been compared above
    if skipped:
        rank_zero_info(f"{source}: the head ({', '.join(sorted(skipped))}) is not loaded and keeps its current values.")


def head_name(model: nn.Module) -> tuple[str, ...]:
    """Find the layers that compute the logits.

    Args:
        model: The model. timm models name this layer; for other models it is the last linear layer.

    Returns:
        Layer names; the empty string if the model itself is a linear layer.

    Raises:
        WeightsError: If the model has no linear layer.

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
        raise WeightsError(f"{type(model).__name__} has no linear layer to use as its head.")
    return (linear[-1],)


def _is_part(name: str, layers: tuple[str, ...]) -> bool:
    return any(not layer or name.startswith(f"{layer}.") for layer in layers)


def _has_other_classes(current: Mapping[str, Tensor], state: Mapping[str, Tensor], head: set[str]) -> bool:
    """Whether the head differs only in dimension 0, the classes."""
    if not all(name in state for name in head):
        return False
    shapes = [(current[name].shape, state[name].shape) for name in head]
    return all(old and new and old[1:] == new[1:] and old[0] != new[0] for old, new in shapes)


def _mismatches(expected: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> dict[str, list[str]]:
    shared = [name for name in expected if name in loaded]
    wrong_type = [name for name in shared if not _is_copyable(loaded[name], expected[name])]
    return {
        "missing": [name for name in expected if name not in loaded and not name.endswith(_COUNTER)],
        "unexpected": [name for name in loaded if name not in expected],
        "wrong shape": [
            f"{name} {list(loaded[name].shape)} instead of {list(expected[name].shape)}"
            for name in shared
            if loaded[name].shape != expected[name].shape
        ],
        "wrong type": [f"{name} {_type_name(loaded[name])}" for name in wrong_type],
        "not finite": [name for name in shared if name not in wrong_type and not torch.isfinite(loaded[name]).all()],
    }


def _is_copyable(source: Tensor, target: Tensor) -> bool:
    """Whether `source` has dense values of the same kind as `target`: integer, real or complex, at any precision."""
    same_kind = source.is_complex() == target.is_complex() and source.is_floating_point() == target.is_floating_point()
    return same_kind and source.layout == torch.strided and not source.is_meta


def _type_name(value: Tensor) -> str:
    parts = [str(value.dtype)]
    if value.layout != torch.strided:
        parts.append(str(value.layout))
    if value.is_meta:
        parts.append("meta")
    return " ".join(part.removeprefix("torch.") for part in parts)
