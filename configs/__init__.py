"""One runnable `LightningCLI` file per experiment.

There is no code here. This file makes the directory a package, so that `importlib.resources` finds the YAML files in a
wheel, in an editable install, and in a clone whose file system has no symbolic links.

Example:
    >>> from importlib import resources
    >>> resources.files("lightning_bayes.configs").joinpath("digits_lenet_vogn.yaml").is_file()
    True
"""

from __future__ import annotations
