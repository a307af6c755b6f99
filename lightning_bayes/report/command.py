"""The command ``lightning-bayes report``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from lightning_bayes.report.runs import read_runs

_NAMES: Final = ("report.html", *(f"report-{number}.html" for number in range(1, 10_000)))


def write_report(folders: Iterable[str | Path], output: str | Path) -> Path:
    """Write one self-contained HTML page that compares the runs in `folders`; return its path."""
    from lightning_bayes.report.page import render  # imports matplotlib and torch

    path = Path(output)
    page = render(read_runs(folders), path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, "utf-8")
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with the arguments that follow ``lightning-bayes report``, by default the arguments of the process."""
    options = parser().parse_args(arguments)
    print(f"wrote {write_report(options.runs, options.output or _free_name())}")


def _free_name() -> Path:
    """``report.html`` in the working directory, or the first of ``report-1.html`` and so on that does not exist."""
    return next(path for path in map(Path, _NAMES) if not path.exists())


def parser() -> argparse.ArgumentParser:
    """The parser of the arguments that follow ``lightning-bayes report``."""
    parser = argparse.ArgumentParser(
        prog="lightning-bayes report",
        description="Compare runs on one HTML page with tables and figures.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder of a run, with its metrics.csv, or of several runs"
    )
    parser.add_argument(
        "--output", help="file to write or replace (default: report.html, or report-1.html and so on if it exists)"
    )
    return parser
