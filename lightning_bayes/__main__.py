"""``python -m lightning_bayes``, the same as the command ``lightning-bayes``."""

from lightning_bayes.cli.commands import main

if __name__ == "__main__":
    main()
