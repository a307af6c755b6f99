"""``python -m lightning_bayes`` and the command ``lightning-bayes``.

``lightning-bayes report --help`` answers without torch, which takes seconds to import.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process."""
    if sys.argv[1:2] == ["report"]:
        from lightning_bayes.report.command import run

        run(sys.argv[2:])
    else:
        from lightning_bayes.cli import main as run_lightning

        run_lightning()


if __name__ == "__main__":
    main()
