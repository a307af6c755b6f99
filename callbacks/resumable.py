"""Tests, before training, whether a run with the user's optimizer can be resumed exactly.

The interface of an optimizer does not reveal whether it keeps state outside of its `state_dict`, such as a counter in an
attribute. So a copy over a few small tensors takes some steps, is saved, and takes more steps. A second copy loads the saved
state and takes the same steps. If their weights differ, no checkpoint can resume a run exactly.
"""

from __future__ import annotations

import copy
import pickle
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bayes.errors import UnsupportedTrainingError

_STEPS = 12  # before and after the save: more than the period of common slow updates (Lookahead: 5 or 6)
_TENSORS = 2  # per group
_SIDE = 3  # largest size of a dimension


def require_resumable(optimizer: Optimizer) -> None:
    """Require an optimizer whose `state_dict` holds all of its state.

    torch's own optimizers pass without a test, and so do optimizers that have already stepped, or whose copy cannot step on
    small tensors.

    Args:
        optimizer: The user's optimizer, which is not changed.

    Raises:
        UnsupportedTrainingError: If a resumed copy takes different steps; names the attributes that steps change.
    """
    if type(optimizer).__module__.startswith("torch.optim") or optimizer.state:
        return
    try:
        with torch.random.fork_rng(devices=[]):
            changed = _lost_attributes(optimizer)
    except Exception:  # foreign code may raise anything; training itself shows whether the optimizer works
        return
    if changed is not None:
        name = type(optimizer).__name__
        where = f" (in {', '.join(changed)})" if changed else ""
        raise UnsupportedTrainingError(
            f"{name} keeps state outside of its state_dict{where}, so a run with it cannot be resumed exactly: its steps "
            f"differ after load_state_dict. Keep that state in {name}.state or in its param_groups, or return Adam, "
            "AdamW or SGD from configure_optimizers."
        )


def _lost_attributes(optimizer: Optimizer) -> list[str] | None:
    """None if a resumed copy takes the same steps, else the attributes that changed before the save."""
    first, second = _small_copy(optimizer), _small_copy(optimizer)
    before = _attributes(first)
    _take_steps(first, 0)
    changed = [name for name, value in _attributes(first).items() if before.get(name) != value]
    saved = copy.deepcopy(first.state_dict())
    for target, source in zip(_params(second), _params(first), strict=True):
        target.data.copy_(source)
    second.load_state_dict(saved)
    _take_steps(first, 1)
    _take_steps(second, 1)
    same = all(torch.equal(a, b) for a, b in zip(_params(first), _params(second), strict=True))
    return None if same else changed


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _small_copy(optimizer: Optimizer) -> Optimizer:
    """A copy over a few small tensors."""
    small = _deep_copy(optimizer, {id(param): _small(param) for param in _params(optimizer)})
    for group in small.param_groups:
        group["params"][:] = group["params"][:_TENSORS]
    return small


def _deep_copy(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A deep copy; `copy.deepcopy` would lose attributes, because `torch.optim.Optimizer` does not pickle them."""
    duplicate: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = duplicate
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            _deep_copy(value, memo)  # such as Lookahead's inner optimizer
        if not isinstance(value, (types.FunctionType, types.MethodType)):  # such as step, wrapped by schedulers
            vars(duplicate)[name] = copy.deepcopy(value, memo)
    return duplicate


def _small(param: Tensor) -> nn.Parameter:
    shape = [min(side, _SIDE) for side in param.shape]
    values = torch.linspace(-1, 1, max(1, torch.Size(shape).numel()), dtype=param.dtype)
    return nn.Parameter(values[: torch.Size(shape).numel()].reshape(shape).clone())


def _take_steps(optimizer: Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(_STEPS):
        for param in _params(optimizer):
            param.grad = torch.randn_like(param)
        optimizer.step()


def _attributes(optimizer: Optimizer) -> dict[str, bytes]:
    """Pickled attributes other than state, groups and inner optimizers; attributes that cannot be pickled are left out."""
    pickled = {}
    for name, value in vars(optimizer).items():
        if name not in {"state", "param_groups", "defaults"} and not isinstance(value, Optimizer):
            try:
                pickled[name] = pickle.dumps(value)
            except Exception:
                continue
    return pickled
