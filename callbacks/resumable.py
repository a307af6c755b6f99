"""Whether an optimizer can be resumed exactly: a rehearsal on a few small tensors, before training.

Nothing in an optimizer's interface tells whether it keeps state outside of its `state_dict`, such as a counter in an
attribute. So a copy of it takes some steps, is saved, goes on; a second copy loads what was saved and goes on as well. If
their weights differ, no checkpoint can resume a run exactly.
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
_TENSORS = 2  # of each group
_SIDE = 3  # at most, of each dimension


def require_resumable(optimizer: Optimizer) -> None:
    """Require an optimizer whose `state_dict` holds all of its state.

    Optimizers of torch are taken to do so. One whose copy cannot step on small tensors is not judged.

    Args:
        optimizer: The user's optimizer, which is left alone.

    Raises:
        UnsupportedTrainingError: Naming the optimizer and the attributes that it changes.
    """
    if type(optimizer).__module__.startswith("torch.optim") or optimizer.state:
        return
    try:
        with torch.random.fork_rng(devices=[]):
            changed = _lost_attributes(optimizer)
    except Exception:  # whatever a stranger's code raises; training itself shows whether it works
        return
    if changed is not None:
        name = type(optimizer).__name__
        raise UnsupportedTrainingError(
            f"{name} keeps state outside of its state_dict"
            f"{f' (in {chr(44).join(changed)})' if changed else ''}, so a run with it cannot be resumed exactly: after a "
            f"load_state_dict its steps differ. Keep that state in {name}.state or in its param_groups, or return Adam, "
            "AdamW or SGD from configure_optimizers."
        )


def _lost_attributes(optimizer: Optimizer) -> list[str] | None:
    """None if a resumed copy takes the same steps; else the attributes that it had changed and lost."""
    first, second = _small_copy(optimizer), _small_copy(optimizer)
    before = _attributes(first)
    _take_steps(first, 0)
    changed = [name for name, value in _attributes(first).items() if before.get(name) != value]
    saved = copy.deepcopy(first.state_dict())
    for mine, theirs in zip(_params(second), _params(first), strict=True):
        mine.data.copy_(theirs)
    second.load_state_dict(saved)
    for each in (first, second):
        _take_steps(each, 1)
    same = all(torch.equal(a, b) for a, b in zip(_params(first), _params(second), strict=True))
    return None if same else changed


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _small_copy(optimizer: Optimizer) -> Optimizer:
    """A copy over a few small tensors."""
    found = _copied(optimizer, {id(param): _small(param) for param in _params(optimizer)})
    for group in found.param_groups:
        group["params"][:] = group["params"][:_TENSORS]
    return found


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A deep copy; `copy.deepcopy` would lose the attributes, which `torch.optim.Optimizer` does not pickle."""
    found: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = found
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            _copied(value, memo)  # such as the one that Lookahead steps with
        if not isinstance(value, (types.FunctionType, types.MethodType)):  # such as step, wrapped by schedulers
            vars(found)[name] = copy.deepcopy(value, memo)
    return found


def _small(param: Tensor) -> nn.Parameter:
    shape = [min(side, _SIDE) for side in param.shape]
    values = torch.linspace(-1, 1, max(1, torch.Size(shape).numel()), dtype=param.dtype)
    return nn.Parameter(values[: torch.Size(shape).numel()].reshape(shape).clone())


def _take_steps(optimizer: Optimizer, part: int) -> None:
    torch.manual_seed(part)
    for _ in range(_STEPS):
        for param in _params(optimizer):
            param.grad = torch.randn_like(param)
        optimizer.step()


def _attributes(optimizer: Optimizer) -> dict[str, bytes]:
    """The values of the attributes other than state and groups, as far as they can be compared."""
    found = {}
    for name, value in vars(optimizer).items():
        if name not in {"state", "param_groups", "defaults"} and not isinstance(value, Optimizer):
            try:
                found[name] = pickle.dumps(value)
            except Exception:
                continue
    return found
