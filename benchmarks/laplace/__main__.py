"""Laplace of this package compared with laplace-torch: relative differences of precision, evidence and predictive.

    python -m benchmarks.laplace [--json benchmarks/results/laplace.json]

``pip install -e '.[bench]'`` installs laplace-torch.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.laplace.agreement import agreements
from benchmarks.provenance import save_json

Record = dict[str, Any]


def table(records: list[Record]) -> str:
    """Format a Markdown table of relative differences; a failure of laplace-torch stands in its line."""
    lines = ["| network | subset | structure | laplace-torch by | precision | evidence | probit |", "|---" * 7 + "|"]
    for line in records:
        values = [f"{line[key]:.0e}" for key in ("precision", "evidence", "probit")] if "probit" in line else None
        cells = [line[key] for key in ("network", "subset", "structure", "backend")]
        lines.append(f"| {' | '.join([*cells, *(values or [line['peer'], '', ''])])} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Compare, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if find_spec("laplace") is None:
        parser.error("laplace-torch is not installed; pip install -e '.[bench]' installs it")
    from laplace.curvature import BackPackGGN, CurvlinopsGGN

    records = list(agreements([CurvlinopsGGN, BackPackGGN]))
    save_json(options.json, {"agreement": records})
    print(table(records))


if __name__ == "__main__":
    main()
