"""All metrics of one tree, as rows of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.house.batch_path import trace_batch
from benchmarks.house.constructors import constructors
from benchmarks.house.prior_strength import prior_strengths
from benchmarks.house.private_symbols import is_table, private_uses
from benchmarks.house.sources import SourceFile, file_lengths, function_lengths, source_files
from benchmarks.trees import run_probe

_ERRORS = "lightning_bayes.errors."
_HOOKS = ("lightning_bayes.optim.hyperparameters.Hyperparameters",)  # algorithms extend it with their fields


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        label: The metric.
        goal: Its target; empty if none.
        value: Its value.
        details: The places behind the value.
    """

    label: str
    goal: str
    value: str
    details: list[str]


def survey(root: Path) -> list[Row]:
    """Measure the tree at `root`; the order of the rows is the same for every tree."""
    files = source_files(root)
    return [*_sizes(files), *_classes(files, root), *_symbols(files), *_prior(files), *_batch(root)]


def _sizes(files: list[SourceFile]) -> list[Row]:
    longest = sorted(files, key=lambda file: -len(file.lines))[:5]
    return [
        Row("lines of source", "", f"{sum(len(file.lines) for file in files)}", []),
        Row("files", "", str(len(files)), []),
        Row("file length: median / p95 / max", "max 400", str(file_lengths(files)), [
            f"{len(file.lines)} {file.name}" for file in longest
        ]),
        Row("function length: median / p95 / max", "", str(function_lengths(files)), []),
    ]  # fmt: skip


def _classes(files: list[SourceFile], root: Path) -> list[Row]:
    ordered = constructors(files)
    largest = ordered[0]
    fields = f" + {largest.unpacked} unpacked" if largest.unpacked else ""
    inherited: dict[str, Any] = run_probe("house/class_probe", root)
    subclassed = [name for name in inherited["subclassed"] if not name.startswith((_ERRORS, *_HOOKS))]
    return [
        Row("arguments of the largest constructor", "≤ 12", f"{largest.own}{fields} ({largest.name})", [
            f"{c.name}: {c.own} + {c.unpacked} unpacked" for c in ordered[:8]
        ]),
        Row("classes", "", str(inherited["classes"]), []),
        Row("levels of inheritance", "≤ 3", str(inherited["levels"]), inherited["deepest"]),
        Row("concrete classes with subclasses, except errors and documented hooks", "0", str(len(subclassed)), subclassed),
    ]  # fmt: skip


def _symbols(files: list[SourceFile]) -> list[Row]:
    uses = private_uses(files)
    outside = [use for use in uses if not is_table(use.file)]
    return [
        Row("private symbols of other libraries", "", str(len({use.name for use in uses})), sorted({
            use.name for use in uses
        })),
        Row("uses of them outside of tables", "0", str(len(outside)), [
            f"{use.file}:{use.line}: {use.name}" for use in outside
        ]),
    ]  # fmt: skip


def _prior(files: list[SourceFile]) -> list[Row]:
    places = prior_strengths(files)
    return [Row("copies of δ̃ = τδ/Ñ", "1", str(len(places)), places)]


def _batch(root: Path) -> list[Row]:
    stops = trace_batch(str(root))
    public = [stop for stop in stops if stop.is_public]
    return [
        Row("one VOGN batch: public functions / files", "≤ 18 / ≤ 9", _count(public), _listed(public)),
        Row("one VOGN batch: with private functions", "", _count(stops), _listed(stops)),
    ]


def _count(stops: list[Any]) -> str:
    return f"{len(stops)} / {len({stop.file for stop in stops})}"


def _listed(stops: list[Any]) -> list[str]:
    return [f"{stop.file}: {stop.function}" for stop in stops]
