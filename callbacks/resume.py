"""Resuming from a checkpoint: what must agree, and what the checkpoint overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_bayes.callbacks.rollback import RollbackOnFailedResume
from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim import value_at
from lightning_bayes.optim.readout import callback_state
from lightning_bayes.optim.settings import plain


@final
class ResumeGuard:
    """Refuses checkpoints that cannot be resumed, before anything is changed, and names what a resumed run keeps."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] = {}  # the callback's state in the checkpoint to resume from
        self._rollback: RollbackOnFailedResume | None = None  # None outside of a fit

    def start(self, strategy: Strategy, module: LightningModule) -> RollbackOnFailedResume:
        """Prepare for a fit that may be resumed.

        Args:
            strategy: The trainer's.
            module: The user's module.

        Returns:
            What loads the checkpoint.
        """
        self._rollback = RollbackOnFailedResume(strategy, module)
        return self._rollback

    def read(self, checkpoint: Mapping[str, Any], callback: str) -> None:
        """Take the callback's state from the checkpoint to resume from.

        Args:
            checkpoint: Contents of a Lightning checkpoint.
            callback: Name of the callback's class, for the message.

        Raises:
            PosteriorError: If the checkpoint holds no state of a noisy optimizer.
        """
        groups = [group for state in checkpoint.get("optimizer_states", []) for group in state["param_groups"]]
        # A distributed checkpoint has no optimizer_states: the strategy has loaded them from files of their own.
        is_noisy = "noise_seed" in groups[0] if groups else bool(callback_state(checkpoint))
        if not is_noisy:
            raise PosteriorError(
                f"The checkpoint was not written with {callback}, so it holds no posterior to resume. To start from its "
                "weights, load them into the module and fit without ckpt_path."
            )
        self.saved = callback_state(checkpoint)

    def check_order(self, names: list[list[str]]) -> None:
        """Require the parameters in the checkpoint's order, because an optimizer's state is saved by position.

        Args:
            names: Names of the new optimizer's parameters, by group.

        Raises:
            PosteriorError: If they differ.
        """
        saved = self.saved.get("param_names", names)
        if saved == names:
            return
        before, now = (", ".join(name for group in both for name in group) for both in (saved, names))
        raise PosteriorError(
            "The checkpoint holds the optimizer's parameters in another order or other groups than configure_optimizers "
            f"gives them now, so their curvature would be mixed up (saved: {before}; now: {now}). Restore the old order."
        )

    def commit(self) -> None:
        """The run has started: its weights stay."""
        if self._rollback is not None:
            self._rollback.commit()

    def warn_of_changes(self, group: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """Name the arguments that the checkpoint overrides.

        Args:
            group: A parameter group after it was restored.
            wanted: The callback's arguments.
        """
        changed = changed_arguments(group, wanted)
        if changed:
            rank_zero_warn(f"The resumed run keeps the checkpoint's {changed}.")

    def end(self) -> None:
        """Restore the old weights if the run has not started, and forget the checkpoint's state."""
        if self._rollback is not None:
            self._rollback.roll_back()
            self._rollback = None


def changed_arguments(group: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """List the arguments whose values in the resumed run are others than those of the callback.

    Args:
        group: A parameter group after it was restored.
        wanted: The callback's arguments.

    Returns:
        ``name=value (now wanted)`` for each; empty if none differs.
    """
    now = plain({name: value_at(value, group["step"]) for name, value in wanted.items()})
    return ", ".join(f"{k}={group[k]!r} (now {v!r})" for k, v in now.items() if group[k] != v)
