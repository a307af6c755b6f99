"""Judge which models are measured correctly, refused or measured wrongly, in evaluation and training mode; resumable.

python -m benchmarks.coverage --json rows.json [--families timm] [--only resnet vit] [--engine backpack] [--limit 60]
python -m benchmarks.coverage --json rows.json --table
"""

from __future__ import annotations

import argparse
import signal
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.coverage.families import CONVOLUTIONAL, FAMILIES, Build
from benchmarks.coverage.judge import judge
from benchmarks.provenance import save_json, saved_rows

MODES = ("evaluation", "training")
WORDS = ("right", "refused", "wrong", "damaged", "crashed", "skipped")


def row_of(family: str, name: str, build: Build, engine: Any, limit: int) -> dict[str, Any]:
    """The verdicts of one model."""
    row: dict[str, Any] = {"family": family, "model": name, "engine": engine}
    try:
        case = _within(limit, build)
    except Exception as error:  # a model that cannot be built is not judged
        return row | {mode: {"word": "skipped", "reason": str(error)[:200]} for mode in MODES}
    for mode in MODES:
        try:
            verdict = _within(limit, lambda mode=mode: judge(case, engine, training=mode == "training"))
            row[mode] = {"word": verdict.word, "reason": verdict.reason}
        except TimeoutError:
            row[mode] = {"word": "skipped", "reason": f"more than {limit} s"}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Format the counts by family and mode, also for timm's convolutional networks, and the reasons of all failures."""
    lines = [f"| family | mode | {' | '.join(WORDS)} |", f"|---|---|{'---:|' * len(WORDS)}"]
    groups = {family: [row for row in rows if row["family"] == family] for family in FAMILIES}
    groups["timm, convolutional"] = [row for row in groups["timm"] if row["model"] in CONVOLUTIONAL]
    for name, mode in product((name for name, members in groups.items() if members), MODES):
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
    """Judge the models without a row in the file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file of rows; existing rows are kept")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--engine", choices=["fused", "backpack"], default="fused")
    parser.add_argument("--limit", type=int, default=60, help="seconds of processor time per measurement")
    parser.add_argument("--table", action="store_true", help="only print the table of the file")
    options = parser.parse_args(arguments)
    rows = saved_rows(options.json, "rows")
    done = {(row["family"], row["model"], row["engine"]) for row in rows}
    signal.signal(signal.SIGPROF, _stop)
    warnings.filterwarnings("ignore")
    torch.set_default_dtype(torch.float32)
    for family in [] if options.table else options.families:
        for name, build in FAMILIES[family]():
            if (family, name, options.engine) in done or not any(part in name for part in options.only):
                continue
            rows.append(row_of(family, name, build, options.engine, options.limit))
            print(family, name, *(f"{mode}: {rows[-1][mode]['word']}" for mode in MODES), flush=True)
            save_json(options.json, {"rows": rows})
    print(table([row for row in rows if row["engine"] == options.engine]))


if __name__ == "__main__":
    main()
