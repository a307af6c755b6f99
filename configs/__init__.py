"""Configs for `LightningCLI`: composable parts, ``data/`` × ``models/`` × ``methods/``, and complete ``recipes/``.

Beside them, ``presets/`` holds published settings of callbacks. `lightning_bayes.cli.composition` and
`lightning_bayes.callbacks` read the files. This file makes the directory a package, so that `importlib.resources` finds
them in a wheel, in an editable install, and in a clone on a file system without symbolic links.

Example:
    >>> from importlib import resources
    >>> resources.files("lightning_bayes.configs").joinpath("methods", "vogn.yaml").is_file()
    True
"""

from __future__ import annotations
