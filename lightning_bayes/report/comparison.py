"""Sentences that compare each run with the first one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from lightning_bayes.metrics.example_scores import Difference, paired_differences
from lightning_bayes.report.runs import Run
from lightning_bayes.report.tables import HEADINGS

_COMPARED: Final = ("cls/Acc", "cls/NLL", "cal/ECE", "reg/RMSE", "reg/NLL")
_LOWER_IS_BETTER: Final = "↓"


def standard_error(run: Run, key: str) -> float | None:
    """The standard error of a test's accuracy or NLL; None if the run did not log the number of examples or the error."""
    if key == "test/cls/Acc" and {key, "test/n"} <= run.last.keys():
        return math.sqrt(run.last[key] * (1 - run.last[key]) / run.last["test/n"])
    return run.last.get(f"{key}_SE")


def against_first(runs: Sequence[Run]) -> Iterator[str]:
    """A sentence for each run after the first with a test on the same data."""
    tested = [run for run in runs if any(f"test/{key}" in run.last for key in _COMPARED)]
    for run in tested[1:]:
        shared = [key for key in _COMPARED if f"test/{key}" in tested[0].last.keys() & run.last.keys()]
        if shared and tested[0].config.get("data.class_path") == run.config.get("data.class_path"):
            yield _sentence(tested[0], run, shared)


def _sentence(first: Run, run: Run, keys: Sequence[str]) -> str:
    paired = {} if first.scores is None or run.scores is None else paired_differences(first.scores, run.scores)
    found = {key: paired.get(key) or _independent(first, run, key) for key in keys}
    parts = [_part(first, run, key, difference) for key, difference in found.items()]
    count = f"{first.last['test/n']:.0f} " if "test/n" in first.last else ""
    kind = f"the same {count}test examples, paired" if paired else "independent tests"
    return f"{run.name} against {first.name} ({kind}): {', '.join(parts)}. {_judgement(found)}"


def _independent(first: Run, run: Run, key: str) -> Difference | None:
    errors = [standard_error(each, f"test/{key}") for each in (first, run)]
    known = [error for error in errors if error is not None]
    value = run.last[f"test/{key}"] - first.last[f"test/{key}"]
    return Difference(value, math.hypot(*known)) if len(known) == len(errors) else None


def _part(first: Run, run: Run, key: str, difference: Difference | None) -> str:
    value = run.last[f"test/{key}"] - first.last[f"test/{key}"]
    return f"{_word(key)} {change(value, None if difference is None else difference.error)}"


def change(value: float, error: float | None) -> str:
    """A difference with its standard error, on one line."""
    text = f"{round(value, 4) + 0.0:+.4f}"  # no negative zero
    return text if error is None else f"{text}\u00a0±\u00a0{error:.4f}"


def _word(key: str) -> str:
    return HEADINGS[key].split(" ")[0]


def _judgement(found: dict[str, Difference | None]) -> str:
    """What is better or worse by two standard errors; empty if no standard error is known."""
    known = {key: difference for key, difference in found.items() if difference is not None}
    clear = {key: d for key, d in known.items() if abs(d.value) > 2 * d.error}
    if not known or not clear:
        return "No difference exceeds two standard errors." if known else "No standard error is known."
    sides: dict[bool, list[str]] = {}
    for key, difference in clear.items():
        sides.setdefault((difference.value < 0) == HEADINGS[key].endswith(_LOWER_IS_BETTER), []).append(_word(key))
    words = {True: "better", False: "worse"}
    parts = [f"{words[side]} {' and '.join(sides[side])}" for side in words if side in sides]
    return f"By more than two standard errors: {', '.join(parts)}."
