"""The command ``lightning-bayes report``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_bayes.report.page import render
from lightning_bayes.report.runs import read_runs


def write_report(folders: Iterable[str | Path], output: str | Path) -> Path:
    """Compare runs on one self-contained HTML page.

    Args:
        folders: Folders of runs, or folders that hold such.
        output: The file to write; its folders are created, a file that is there already is replaced.

    Returns:
        Its path.
    """
    page = render(read_runs(folders))
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, "utf-8")
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: What follows ``lightning-bayes report``; None takes the process's arguments.
    """
    options = parser().parse_args(arguments)
    print(f"wrote {write_report(options.runs, options.output)}")


def parser() -> argparse.ArgumentParser:
    """The command's arguments.

    Returns:
        Their parser.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-bayes report",
        description="Write one HTML page that compares runs, figures and tables included.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder of a run, with its metrics.csv, or folder of several such"
    )
    parser.add_argument("--output", default="report.html", help="file to write (default: report.html)")
    return parser
