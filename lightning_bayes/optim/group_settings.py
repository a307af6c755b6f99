"""The settings of an optimizer's groups: checked when a group starts, scheduled from then on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, final

from torch.optim import Optimizer

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim.base_optimizer import decay_kind, step_for
from lightning_bayes.optim.groups import KEY, SHARED, flat, split
from lightning_bayes.optim.settings import Declaration, plain
from lightning_bayes.optim.steps import Step

_FOLLOWED: Final = ("num_data", "relative_noise", "noise_flatness")


@final
class GroupSettings:
    """Checks the settings of new groups, and evaluates schedules; `check` refuses combinations of values."""

    def __init__(
        self, declaration: Declaration, check: Callable[[dict[str, Any]], None], steps: Mapping[str, Step]
    ) -> None:
        self._declaration, self._check_together, self._steps = declaration, check, steps
        self._schedules: list[dict[str, Callable[[int], Any]]] = []  # of each group, by hyperparameter
        self.have_schedules = False

    def start(
        self, group: dict[str, Any], defaults: Mapping[str, Any], owner: Optimizer | None, *, states_precision: bool
    ) -> None:
        """Check the settings of a new group of `owner`, another optimizer if any, and take its schedules."""
        settings = group.setdefault(KEY, dict(defaults))
        if owner is not None:
            settings["decay"] = decay_kind(owner, group, states_precision=states_precision)
        schedules = {name: value for name, value in flat(group).items() if callable(value)}
        self._declaration.require_schedulable(schedules)
        self._evaluate(schedules, group)
        self._schedules.append(schedules)
        self.have_schedules |= bool(schedules)
        settings.update(plain(settings))
        if owner is None:
            group.update(plain({name: group[name] for name in SHARED if name in group}))
        self._check(group)
        step = step_for(settings["step_rule"], self._steps)
        if settings["antithetic"] is None:
            settings["antithetic"] = not step.is_published

    def _check(self, group: Mapping[str, Any]) -> None:
        values = plain(flat(group))
        self._declaration.check(values)
        self._check_together(values)

    @staticmethod
    def follow(restored: Mapping[str, Any], defaults: dict[str, Any]) -> None:
        """Let groups that are added to a restored run have its N and its noise."""
        settings = restored[KEY]
        names = (name for name in _FOLLOWED if name in settings and not callable(defaults[name]))
        defaults.update({name: settings[name] for name in names})

    def set(self, groups: Sequence[dict[str, Any]], **values: Any) -> None:
        """Set hyperparameters in all groups; raises `HyperparameterError` if a value is out of range."""
        for group in groups:
            group[KEY].update(values)
            self._check(group)

    def apply_schedules(self, groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> None:
        """Evaluate the schedules of all groups; a group that a callback has restored follows those of the defaults."""
        of_defaults = {name: value for name, value in defaults.items() if callable(value)}
        for group, schedules in zip_longest(groups, self._schedules[: len(groups)], fillvalue=of_defaults):
            self._evaluate(schedules, group)

    def _evaluate(self, schedules: Mapping[str, Callable[[int], Any]], group: dict[str, Any]) -> None:
        """Write the values of schedules at the group's step into the group."""
        step = int(group[KEY]["step"])
        values = plain({name: function(step) for name, function in schedules.items()})
        try:
            self._declaration.check(values)
        except HyperparameterError as error:
            raise HyperparameterError(f"{error} A function of the step returned this value at step {step}.") from None
        top, settings = split(values)
        group.update(top)
        group[KEY].update(settings)
