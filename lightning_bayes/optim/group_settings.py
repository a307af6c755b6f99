"""The settings of an optimizer's groups: checked when a group starts, scheduled from then on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

from torch.optim import Optimizer

from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.groups import KEY, SHARED, flat
from lightning_bayes.optim.hyperparameters import Hyperparameters
from lightning_bayes.optim.measuring import require_interval
from lightning_bayes.optim.schedules import apply_schedules, take_schedules
from lightning_bayes.optim.settings import plain
from lightning_bayes.optim.steps import Step, step_for
from lightning_bayes.optim.steps.decay import decay_kind

_FOLLOWED: Final = ("num_data", "relative_noise", "noise_flatness")


@final
class GroupSettings:
    """Checks the settings of new groups, and evaluates schedules; `method` is the optimizer's name."""

    def __init__(
        self, method: str, record: type[Hyperparameters], steps: Mapping[str, Step], *, amortises: bool
    ) -> None:
        self._method, self._record, self._steps, self._amortises = method, record, steps, amortises
        self._schedules: list[dict[str, Callable[[int], Any]]] = []  # of each group, by hyperparameter

    def start(
        self, group: dict[str, Any], defaults: Mapping[str, Any], owner: Optimizer | None, *, states_precision: bool
    ) -> None:
        """Check the settings of a new group of `owner`, another optimizer if any, and take its schedules."""
        settings = group.setdefault(KEY, dict(defaults))
        if owner is not None:
            settings["decay"] = decay_kind(owner, group, states_precision=states_precision)
        self._schedules.append(take_schedules(group, self._record))
        settings.update(plain(settings))
        if owner is None:
            group.update(plain({name: group[name] for name in SHARED if name in group}))
        self._record.check(plain(flat(group)), complete=True)
        step = step_for(settings["step_rule"], self._steps)
        if settings["antithetic"] is None:
            settings["antithetic"] = not step.is_published
        require_interval(self._method, settings["curvature_interval"], amortises=self._amortises)

    def complete(self, groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> None:
        """Give the defaults' schedules to groups that a callback has restored."""
        while len(self._schedules) < len(groups):
            self._schedules.append({name: value for name, value in defaults.items() if callable(value)})

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
            self._record.check(plain(flat(group)))

    def count_update(self, index: int, group: dict[str, Any]) -> bool:
        """Count an update of a group, and evaluate its schedules; whether the prior's δ̃ falls or Ñ/τ grows."""
        before = effective(group)
        group[KEY]["step"] += 1
        if self._schedules[index]:
            apply_schedules(group, self._schedules[index], self._record)
        after = effective(group)
        return after.prior < before.prior or after.scale > before.scale
