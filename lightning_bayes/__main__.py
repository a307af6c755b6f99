"""``python -m lightning_bayes`` is the command ``lightning-bayes``."""

from __future__ import annotations

from lightning_bayes.cli import main

if __name__ == "__main__":
    main()
