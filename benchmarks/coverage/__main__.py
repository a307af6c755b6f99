"""Which models are measured right, refused or wrong, in evaluation and in training mode; one row each, resumable.

python -m benchmarks.coverage --json rows.json [--families timm] [--only resnet vit] [--engine backpack] [--limit 60]
python -m benchmarks.coverage --json rows.json --table
"""

from __future__ import annotations

import argparse
import json
import signal
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.coverage.families import CONVOLUTIONAL, FAMILIES, Build
from benchmarks.coverage.judge import judge
from benchmarks.provenance import provenance

MODES = ("evaluation", "training")
WORDS = ("right", "refused", "wrong", "damaged", "crashed", "skipped")


def row_of(family: str, name: str, build: Build, engine: Any, limit: int) -> dict[str, Any]:
    """The verdicts of one model."""
    row: dict[str, Any] = {"family": family, "model": name, "engine": engine}
    try:
        case = _within(limit, build)
    except Exception as error:  # what cannot be built here is no model of ours
        return row | {mode: {"word": "skipped", "reason": str(error)[:200]} for mode in MODES}
    for mode in MODES:
        try:
            found = _within(limit, lambda mode=mode: judge(case, engine, training=mode == "training"))
            row[mode] = {"word": found.word, "reason": found.reason}
        except TimeoutError:
            row[mode] = {"word": "skipped", "reason": f"more than {limit} s"}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Counts by family and mode, those of timm's convolutional networks, and the reasons of all that is not right."""
    lines = [f"| family | mode | {' | '.join(WORDS)} |", f"|---|---|{'---:|' * len(WORDS)}"]
    groups = {family: [row for row in rows if row["family"] == family] for family in FAMILIES}
    groups["timm, convolutional"] = [row for row in groups["timm"] if row["model"] in CONVOLUTIONAL]
    for name, mode in ((name, mode) for name, own in groups.items() if own for mode in MODES):
        counts = Counter(row[mode]["word"] for row in groups[name])
        lines.append(f"| {name} | {mode} | {' | '.join(str(counts[word]) for word in WORDS)} |")
    reasons = [
        f"- {row['family']} {row['model']}, {mode}: {row[mode]['word']}. {row[mode]['reason']}"
        for row in rows
        for mode in MODES
        if row[mode]["word"] not in {"right", "skipped"}
    ]
    return "\n".join([*lines, "", *reasons])


def _within(limit: int, function: Callable[[], Any]) -> Any:
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        return function()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _stop(*_: Any) -> None:
    raise TimeoutError


def main(arguments: list[str] | None = None) -> None:
    """Judge what the file has no row of yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="rows; those that are there are kept")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--engine", choices=["fused", "backpack"], default="fused")
    parser.add_argument("--limit", type=int, default=60, help="seconds of processor time for one measurement")
    parser.add_argument("--table", action="store_true", help="print the table of the file, and judge nothing")
    options = parser.parse_args(arguments)
    rows = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    known = {(row["family"], row["model"], row["engine"]) for row in rows}
    signal.signal(signal.SIGPROF, _stop)
    warnings.filterwarnings("ignore")
    torch.set_default_dtype(torch.float32)
    for family in [] if options.table else options.families:
        for name, build in FAMILIES[family]():
            if (family, name, options.engine) in known or not any(part in name for part in options.only):
                continue
            rows.append(row_of(family, name, build, options.engine, options.limit))
            print(family, name, *(f"{mode}: {rows[-1][mode]['word']}" for mode in MODES), flush=True)
            options.json.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")
    print(table([row for row in rows if row["engine"] == options.engine]))


if __name__ == "__main__":
    main()
