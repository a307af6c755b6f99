"""``python -m lightning_bayes`` and the command ``lightning-bayes``.

``--version`` and ``report --help`` do not import torch, which takes seconds.
"""

from __future__ import annotations

import sys
from importlib.metadata import version


def main() -> None:
    """Run the command line of this process."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "--version":
        print(f"lightning-bayes {version('lightning-bayes')}")
    elif command == "report":
        from lightning_bayes.report.command import main as run_report

        run_report(sys.argv[2:])
    elif command == "list":
        from lightning_bayes.listing import run as run_list

        run_list(sys.argv[2:])
    else:
        from lightning_bayes.cli import main as run_lightning

        run_lightning()


if __name__ == "__main__":
    main()
