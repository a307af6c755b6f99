"""Bayesian deep learning with noisy natural gradients for PyTorch Lightning.

    Trainer(callbacks=[VOGNCallback()])

turns training of an unmodified LightningModule into variational inference. The same optimizers work in plain PyTorch.

The public names load with their first use, because the import of torch and Lightning takes seconds.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_bayes.public import *  # noqa: F403
    from lightning_bayes.public import __all__ as __all__

    __version__: str


def __getattr__(name: str) -> object:
    from importlib import import_module, metadata, util

    if name == "__version__":
        try:
            return metadata.version("lightning-bayes")
        except metadata.PackageNotFoundError:  # a source tree that is not installed
            return "0+unknown"
    is_private = name.startswith("_") and name != "__all__"
    if not is_private and util.find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    public = None if is_private else import_module(f"{__name__}.public")
    if public is None or name not in ["__all__", *public.__all__]:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(public, name)


def __dir__() -> list[str]:
    from lightning_bayes.public import __all__

    return ["__version__", *__all__]
