"""Going on from a checkpoint: what must agree, and what is taken from it rather than from the arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim import value_at
from lightning_bayes.optim.settings import plain
from lightning_bayes.posteriors import callback_state


def saved_state(checkpoint: Mapping[str, Any], callback: str) -> dict[str, Any]:
    """The state of a callback of the family in a checkpoint.

    Args:
        checkpoint: Contents of a Lightning checkpoint.
        callback: Who asks, for the message.

    Returns:
        What its `state_dict` had returned; empty if the checkpoint does not tell.

    Raises:
        PosteriorError: If the checkpoint holds no state of a noisy optimizer.
    """
    groups = [group for state in checkpoint.get("optimizer_states", []) for group in state["param_groups"]]
    if not groups or "noise_seed" not in groups[0]:
        raise PosteriorError(
            f"The checkpoint was not written with {callback}, so it holds no posterior to resume. To start from its "
            "weights, load them into the module and fit without ckpt_path."
        )
    return callback_state(checkpoint)


def check_order(saved: list[list[str]] | None, names: list[list[str]]) -> None:
    """Require the parameters in the order of the checkpoint, because an optimizer's state is saved by position.

    Args:
        saved: Names of the saved parameters, by group; None if they are not known.
        names: Names of the new optimizer's parameters, by group.

    Raises:
        PosteriorError: If they differ.
    """
    if saved is None or saved == names:
        return
    before, now = (", ".join(name for group in both for name in group) for both in (saved, names))
    raise PosteriorError(
        "The checkpoint holds the optimizer's parameters in another order or other groups than configure_optimizers gives "
        f"them now, so their curvature would be mixed up (saved: {before}; now: {now}). Restore the old order."
    )


def changed_arguments(group: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """List the arguments that the resumed run has and the callback does not ask for.

    Args:
        group: A parameter group after it was restored.
        wanted: What the callback's arguments say.

    Returns:
        ``name=value (now wanted)`` for each, or nothing.
    """
    now = plain({name: value_at(value, group["step"]) for name, value in wanted.items()})
    return ", ".join(f"{k}={group[k]!r} (now {v!r})" for k, v in now.items() if group[k] != v)
