"""The first hour of a new user, from an empty environment.

    python -m benchmarks.first_hour [--reuse] [--tree FOLDER] [--folder FOLDER] [--json FILE]

The wheel is built and installed with the extra ``demo``. Then README runs, and what a newcomer does with own modules and
data, in a folder outside of the repository. ``--reuse`` installs only the wheel and takes its dependencies from the
environment of this process, so nothing is downloaded. ``--tree`` builds the wheel of another version's source tree, for a
comparison: its README is left out.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.first_hour.readme import ROOT, installation, readme, run
from benchmarks.first_hour.tasks import run_tasks, table
from benchmarks.provenance import save_json


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reuse", action="store_true", help="take dependencies from this environment")
    parser.add_argument("--tree", type=Path, default=ROOT, help="source tree of the version (default: this one)")
    parser.add_argument("--folder", type=Path, help="empty folder for the results (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        timings = run(installation(folder, options.reuse, options.tree.resolve()), folder)
        if options.tree == ROOT:
            timings += run(readme(folder), folder)
            posterior, total = (sum(seconds for _, seconds in part) for part in (timings[:4], timings))
            print(f"{total:7.1f} s  {len(timings)} steps; {posterior / 60:.1f} minutes to the first posterior")
        tasks = list(run_tasks(folder / "env", folder / "newcomer"))
    print(table(tasks))
    save_json(options.json, {"reuse": options.reuse, "steps": dict(timings), "tasks": [t._asdict() for t in tasks]})


if __name__ == "__main__":
    main()
