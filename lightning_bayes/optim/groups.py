"""The layout of parameter groups: learning rates as in `torch.optim`, and all settings of the posterior under one key.

    {"params": [...], "lr": 0.1, "weight_decay": 0.0, "posterior": {"betas": (0.9, 0.999), "num_data": 100, ...}}

Schedulers write the entries of `SHARED`, which stand at the top level. A group may also be the group of another optimizer,
with entries of its own, such as Adam's ``betas``; those under ``"posterior"`` never meet them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch.optim import Optimizer

KEY: Final = "posterior"
FORMAT: Final = 4  # of the optimizer's state_dict
SHARED: Final = ("lr", "weight_decay", "momentum")


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split settings by place: those at the top level of a group, and those under ``"posterior"``."""
    top = {name: value for name, value in values.items() if name in SHARED}
    return top, {name: value for name, value in values.items() if name not in SHARED}


def flat(group: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a group by name, such as for checks and messages."""
    return {**{name: group[name] for name in SHARED if name in group}, **group[KEY]}


def beside(owner: Optimizer | None, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict of an optimizer with shared groups: its owner's, which plain training loads, and ours beside it."""
    if owner is None:
        return state_dict
    theirs = {name: value for name, value in owner.state_dict().items() if name != "param_groups"}
    ours = {name: value for name, value in state_dict.items() if name != "state"}
    return {**theirs, **ours, KEY: state_dict["state"]}


def apart(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our state dict and that of the groups' owner; the inverse of `beside`."""
    theirs = {name: value for name, value in state_dict.items() if name != KEY}
    return {**theirs, "state": state_of(state_dict)}, theirs


def state_of(state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """The states of the parameters in a saved state dict."""
    states: dict[Any, Any] = state_dict.get(KEY, state_dict["state"])
    return states
