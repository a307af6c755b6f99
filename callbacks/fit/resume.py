"""Resuming from a checkpoint: what it holds, and what it overrides. `optim.resuming` has the table of what must agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_bayes.callbacks.fit.fields import CallbackArguments
from lightning_bayes.callbacks.fit.num_data import with_augmentation_factor
from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim import VariationalOptimizer, value_at
from lightning_bayes.optim.groups import KEY, flat
from lightning_bayes.optim.parameters import stored_names
from lightning_bayes.optim.readout import POSTERIOR_KEY, callback_state
from lightning_bayes.optim.resuming import RECORD
from lightning_bayes.optim.settings import plain
from lightning_bayes.optim.weight_prior import holds_priors


def param_names(optimizer: VariationalOptimizer, callback: str) -> list[list[str]]:
    """The names of the trained parameters; none if some were removed, such as adapters that were merged."""
    names = stored_names(optimizer.model)
    removed = sum(param not in names for group in optimizer.param_groups for param in group["params"])
    if removed:
        rank_zero_warn(
            f"{callback}: {removed} trained parameters are no longer part of {type(optimizer.model).__name__}, so this "
            "checkpoint holds no posterior. Save one before you merge adapters or remove parametrizations."
        )
        return []
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


def resumable_state(checkpoint: Mapping[str, Any], callback: str) -> dict[str, Any]:
    """The callback's state in a checkpoint to resume from; raises `PosteriorError` if no noisy optimizer wrote it."""
    groups = [group for state in checkpoint.get("optimizer_states", []) for group in state["param_groups"]]
    state = callback_state(checkpoint)
    # A distributed checkpoint has no optimizer_states: the strategy loads them from separate files.
    is_noisy = KEY in groups[0] if groups else bool(state)
    if not is_noisy:
        raise PosteriorError(
            f"The checkpoint was not written with {callback}, so it holds no posterior to resume. To start from its "
            "weights, load them into the module and fit without ckpt_path."
        )
    return state


def refuse_noisy_state(checkpoint: Mapping[str, Any], callback: str) -> None:
    """Raise `PosteriorError` if a noisy optimizer wrote the state that the user's own optimizer would load."""
    for state in checkpoint.get("optimizer_states", []):
        if RECORD in state:
            raise PosteriorError(
                f"The run cannot resume, because the algorithm has changed (saved: {state[RECORD]['algorithm']}; now: the "
                f"user's optimizer, with {callback}). Restore the old callback; or, to start anew from the weights alone, "
                "load them into the module and fit without ckpt_path."
            )


def refuse_other_posterior(checkpoint: Mapping[str, Any], callback: str) -> None:
    """Raise `PosteriorError` if another post-hoc callback wrote the posterior of a checkpoint that is evaluated."""
    saved = checkpoint.get("callbacks", {}).get(POSTERIOR_KEY, {}).get("callback", callback)
    if saved != callback:
        raise PosteriorError(
            f"The checkpoint holds a posterior of {saved}, which {callback} cannot evaluate. Use {saved}, or load the "
            "weights into the module and evaluate without ckpt_path."
        )


def warn_of_kept(callback: str, saved: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """Warn about arguments of a callback that differ from those with which a checkpoint was made."""
    changed = [f"{name}={old!r} (now {now[name]!r})" for name, old in saved.items() if name in now and old != now[name]]
    if changed:
        rank_zero_warn(f"{callback}: {what} {', '.join(changed)}.")


def warn_of_changes(
    trainer: Trainer, optimizer: VariationalOptimizer, arguments: CallbackArguments, saved: Mapping[str, Any]
) -> None:
    """Warn about arguments that the checkpoint overrides, after the optimizer's state was restored."""
    restored = flat(optimizer.param_groups[0])
    requested = _requested_hyperparameters(trainer, arguments)
    if "lr" in saved and not callable(arguments.lr):
        # The group's lr follows the user's scheduler, so the callbacks' arguments are compared.
        restored["lr"], requested["lr"] = saved["lr"], arguments.lr
    requested = plain({name: value_at(value, restored["step"]) for name, value in requested.items()})
    changed = [
        f"{name}={restored[name]!r} (now {value!r})" for name, value in requested.items() if restored[name] != value
    ]
    if changed:
        rank_zero_warn(f"The resumed run keeps the checkpoint's {', '.join(changed)}.")
    if not holds_priors(optimizer.state, optimizer.weight_priors):
        rank_zero_warn(
            "The resumed run keeps the checkpoint's prior of each weight, which differs from the callback's prior=. "
            "Start a new fit for another prior."
        )


def _requested_hyperparameters(trainer: Trainer, arguments: CallbackArguments) -> dict[str, Any]:
    """Hyperparameters of a group that the callback's arguments determine, by name."""
    requested = with_augmentation_factor(arguments.group_defaults, trainer)
    requested["noise_seed"] = arguments.optimizer_kwargs["seed"]
    if arguments.num_data is not None:
        requested["num_data"] = arguments.num_data
    if arguments.prior_precision is not None:
        requested["prior_precision"] = arguments.prior_precision
    if arguments.is_default_interval:
        del requested["curvature_interval"]
    if requested.get("rescale_lr", False) is None:  # IVON's start is chosen by the optimizer
        del requested["rescale_lr"]
        if requested["init_precision"] is None:
            del requested["init_precision"]
    if requested["antithetic"] is None:
        del requested["antithetic"]
    if arguments.is_default_noise:
        del requested["relative_noise"], requested["noise_flatness"]  # set once the loss is known
    return requested
