"""Format a result of `benchmarks.speed.step` or `benchmarks.speed.profile` as the tables of docs/speed.md.

python -m benchmarks.speed.table RESULT.json                        prints Markdown
python -m benchmarks.speed.table RESULT.json --write docs/speed.md  inserts it between the comments that name the file
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.speed.methods import METHODS
from benchmarks.speed.models import MODELS
from benchmarks.speed.profile import PHASES, floor_and_ratio

NOT_MEASURED = "Not measured yet."
VERSIONS = ("torch", "backpack-for-pytorch", "opacus", "ivon-opt")
BLOCK = re.compile(r"(<!-- table of (?P<name>\S+) -->\n)(?P<content>.*?)(<!-- end of table -->)", re.DOTALL)

Row = dict[str, Any]


def render(result: dict[str, Any]) -> str:
    """Format a result file: the setting, times, memory, and the methods that did not run."""
    if "profiles" in result:
        return f"{_setting(result)}\n\n{_phases(result)}\n"
    rows = result["results"]
    parts = [_setting(result), _grid(rows, "Adam's step, and the ratio to it", _time_cell)]
    if cycles := [row for row in rows if "shares" in row]:
        parts.append(_shares(cycles))
    if any("added_mib" in row for row in rows):
        parts.append(_grid(rows, "Peak added memory in MiB", _memory_cell))
    parts += ["\n".join(lines) for lines in (list(_fewer_rounds(rows, result)), list(_not_run(rows))) if lines]
    return "\n\n".join(parts) + "\n"


def _setting(result: dict[str, Any]) -> str:
    device = result["processor"] if result["device"] == "cpu" else result["device"]
    versions = ", ".join(f"{name} {result[name]}" for name in VERSIONS if name in result)
    environment = "".join(f"; {name}={value}" for name, value in result["environment"].items())
    rounds = f"{result['rounds']} interleaved rounds" + (" by processor time" if result.get("clock") == "cpu" else "")
    return (
        f"{device}, {result['threads']} threads, precision {result['precision']}, {rounds}; "
        f"{versions}; commit {result['commit']}{environment}."
    )


def _grid(rows: list[Row], caption: str, cell: Callable[[Row], str]) -> str:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    texts = {(row["model"], row["batch"], row["method"]): cell(row) for row in rows}
    header = [caption, "batch", *(METHODS[name].title for name in methods)]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        cells = (texts.get((model, batch, name), "–") for name in methods)
        lines.append([MODELS[model].title, str(batch), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shares(rows: list[Row]) -> str:
    header = ["Shares of the mean step", "batch", "method", "ratio, quartiles", *rows[0]["shares"]]
    lines = [header, ["---", "---:", "---", *["---:"] * (len(header) - 3)]]
    for row in rows:
        spread = "{:.2f} to {:.2f}".format(*row["quartiles"]) if row["quartiles"] else "?"
        shares = (f"{share:.1%}" for share in row["shares"].values())
        lines.append([MODELS[row["model"]].title, str(row["batch"]), METHODS[row["method"]].title, spread, *shares])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _phases(result: dict[str, Any]) -> str:
    header = [f"Milliseconds at batch {result['batch']}", *PHASES, "sum, in steps of Adam", "floor"]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for model, profile in result["profiles"].items():
        floor, ratio = floor_and_ratio(profile["phases"])
        times = (f"{profile['phases'][phase] * 1e3:.1f}" for phase in PHASES)
        lines.append([MODELS[model].title, *times, f"{ratio:.2f}", f"{floor:.2f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _time_cell(row: Row) -> str:
    if "reason" in row:
        return "–"
    if row["method"] == "adam":
        return f"{row['seconds'] * 1e3:.1f} ms"
    return "?" if row["ratio"] is None else f"{row['ratio']:.2f}"


def _memory_cell(row: Row) -> str:
    return "–" if row.get("added_mib") is None else f"{row['added_mib']:.0f}"


def _fewer_rounds(rows: list[Row], result: dict[str, Any]) -> Iterator[str]:
    slow = [row for row in rows if "reason" not in row and row["rounds"] < result["rounds"]]
    if slow:
        named = (f"{METHODS[r['method']].title} on {_place(r)} ({r['rounds']})" for r in slow)
        yield f"Slow methods took part in fewer rounds: {', '.join(named)}."


def _not_run(rows: list[Row]) -> Iterator[str]:
    places: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        reason = row.get("reason") or (row.get("memory_reason") and f"no memory figure, {row['memory_reason']}")
        if reason:
            places.setdefault((row["method"], reason), []).append(_place(row))
    if places:
        yield "Not run (–):\n"
    for (method, reason), models in places.items():
        yield f"- {METHODS[method].title} on {', '.join(models)}: {reason}"


def _place(row: Row) -> str:
    return f"{MODELS[row['model']].title} at {row['batch']}"


def blocks(text: str) -> dict[str, str]:
    """The text between the comments of a document, by the result file that they name."""
    return {match["name"]: match["content"] for match in BLOCK.finditer(text)}


def insert(text: str, name: str, table: str) -> str:
    """Insert a table between the comments of a document that name its result file; exit if there are none."""
    if name not in blocks(text):
        names = ", ".join(blocks(text)) or "none"
        raise SystemExit(f"No '<!-- table of {name} -->' … '<!-- end of table -->' in the document (it has: {names}).")
    return BLOCK.sub(lambda m: m[1] + table + m[4] if m["name"] == name else m[0], text)


def main(arguments: list[str] | None = None) -> None:
    """Print the tables, or insert them into a document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="a JSON file of benchmarks.speed.step or benchmarks.speed.profile")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT")
    options = parser.parse_args(arguments)
    table = render(json.loads(options.result.read_text("utf-8")))
    if options.write is None:
        print(table, end="")
    else:
        options.write.write_text(insert(options.write.read_text("utf-8"), options.result.name, table), "utf-8")


if __name__ == "__main__":
    main()
