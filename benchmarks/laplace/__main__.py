"""Laplace of this package compared with laplace-torch: agreement, then time and memory.

    python -m benchmarks.laplace [--only agreement cost] [--json benchmarks/results/laplace.json] [--table]

``pip install -e '.[bench]'`` installs laplace-torch. Each cost is measured in a separate process with one thread.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from benchmarks.laplace.agreement import agreements
from benchmarks.provenance import save_json

PACKAGES: Final = ("lightning-bayes", "CurvlinopsGGN", "BackPackGGN")
# network, subset, structure, batch, examples
COSTS: Final = (
    ("lenet5", "last_layer", "kronecker", 100, 1000),
    ("lenet5", "all", "diagonal", 20, 200),
    ("lenet5", "all", "kronecker", 100, 1000),
    ("resnet18", "last_layer", "kronecker", 32, 128),
    ("resnet18", "last_layer", "full", 32, 128),
    ("resnet18", "all", "diagonal", 2, 4),
    ("resnet18", "all", "kronecker", 16, 32),
)
Record = dict[str, Any]


def cost(setting: tuple[Any, ...], package: str) -> Record:
    """Measure the cost of one setting."""
    network, subset, structure, batch, examples = setting
    words = [network, package, subset, structure, str(batch), str(examples)]
    command = [sys.executable, "-m", "benchmarks.laplace.cost", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    outcome = json.loads(lines[-1]) if done.returncode == 0 and lines else {"error": "the process was killed"}
    return {"setting": list(setting), "package": package, **outcome}


def table(records: dict[str, list[Record]]) -> str:
    """Format two Markdown tables: relative differences, then costs."""
    lines = ["| network | subset | structure | laplace-torch by | precision | evidence | probit |", "|---" * 7 + "|"]
    for line in records["agreement"]:
        values = [f"{line[key]:.0e}" for key in ("precision", "evidence", "probit")] if "probit" in line else None
        cells = [
            line["network"],
            line["subset"],
            line["structure"],
            line["backend"],
            *(values or [line["peer"], "", ""]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| network | subset | structure | batch | images | package | CPU s | peak MiB |", "|---" * 8 + "|"]
    for record in records["cost"]:
        numbers = (
            ["—", record["error"]]
            if "error" in record
            else [
                f"{record['cpu_seconds']:.1f}",
                f"{record['peak_mib']:.0f}",
            ]
        )
        lines.append(f"| {' | '.join([*map(str, record['setting']), record['package'], *numbers])} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run the requested measurements, save them, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["agreement", "cost"], default=["agreement", "cost"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    saved = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    records = {key: saved.get(key, []) for key in ("agreement", "cost")}
    if not options.table:
        _measure(options.only, records)
        save_json(options.json, records)
    print(table(records))


def _measure(kinds: list[str], records: dict[str, list[Record]]) -> None:
    has_peer = find_spec("laplace") is not None
    if not has_peer:
        print("laplace-torch is not installed and is left out; pip install -e '.[bench]' installs it.")
    if "agreement" in kinds and has_peer:
        from laplace.curvature import BackPackGGN, CurvlinopsGGN

        records["agreement"] = list(agreements([CurvlinopsGGN, BackPackGGN]))
    if "cost" in kinds:
        records["cost"] = []
        for setting in COSTS:
            for package in PACKAGES if has_peer else PACKAGES[:1]:
                records["cost"].append(cost(setting, package))
                print(records["cost"][-1], flush=True)


if __name__ == "__main__":
    main()
