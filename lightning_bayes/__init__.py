"""Bayesian deep learning with noisy natural gradients for PyTorch Lightning.

    Trainer(callbacks=[VOGNCallback()])

turns training of an unmodified LightningModule into variational inference. The same optimizers work in plain PyTorch.
"""

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

# These commands import torch only when they need it, because the import of torch and Lightning takes seconds.
_IS_COMMAND = Path(sys.argv[0] if sys.argv else "").stem in {"-m", "lightning-bayes"}
_IS_LAZY = _IS_COMMAND and sys.argv[1:2] in (["report"], ["--version"])

if TYPE_CHECKING or not _IS_LAZY:
    from lightning_bayes.public import *  # noqa: F403
    from lightning_bayes.public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        return getattr(import_module("lightning_bayes.public"), name)


try:
    __version__ = version("lightning-bayes")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"
