"""The layout of parameter groups: learning rates as in `torch.optim`, and all settings of the posterior under one key.

    {"params": [...], "lr": 0.1, "weight_decay": 0.0, "posterior": {"betas": (0.9, 0.999), "num_data": 100, ...}}

Schedulers write the entries of `SHARED`, which stand at the top level. A group may also be the group of another optimizer,
with entries of its own, such as Adam's ``betas``; those under ``"posterior"`` never meet them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

KEY: Final = "posterior"
FORMAT: Final = 3  # of the optimizer's state_dict
SHARED: Final = ("lr", "weight_decay", "momentum")


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split settings by place: those at the top level of a group, and those under ``"posterior"``."""
    top = {name: value for name, value in values.items() if name in SHARED}
    return top, {name: value for name, value in values.items() if name not in SHARED}


def flat(group: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a group by name, such as for checks and messages."""
    return {**{name: group[name] for name in SHARED if name in group}, **group[KEY]}
