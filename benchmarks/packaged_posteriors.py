"""Train, test and export the posteriors in the wheel: ``python -m benchmarks.packaged_posteriors --root DATA``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from lightning_bayes.cli.commands import main as command
from lightning_bayes.zoo.hub import PACKAGED

QUIET = ("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")
POSTERIORS = {  # name: config, and arguments of the fit and the test
    "lenet5-digits": ("digits+lenet5+vogn", ()),
    "lenet5-fashion_mnist": (
        "fashion_mnist+lenet5+vogn",
        (
            "--trainer.max_epochs=20",
            "--trainer.check_val_every_n_epoch=20",
            "--model.lr_scheduler=lightning_bayes.zoo.CosineToEnd",
            "--data.ood=[mnist]",
        ),
    ),
}


def run(*words: str) -> None:
    """Run one command of the command line in this process."""
    sys.argv = ["lightning-bayes", *words]
    command()


def train(name: str, root: Path) -> None:
    """Fit, test and export one posterior in a temporary folder."""
    config, options = POSTERIORS[name]
    arguments = [*QUIET, *options]
    start = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("data").symlink_to(root)  # so that the config names no folder of this machine
        try:
            run("fit", "--config", config, *arguments)
            run("test", "--config", config, *arguments, "--ckpt_path=last")
            run("export", f"runs/{config.replace('+', '_')}/version_0", str(PACKAGED.resolve() / f"{name}.safetensors"))
        finally:
            os.chdir(start)


def main() -> None:
    """Train the named posteriors, by default all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(POSTERIORS))
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder of torchvision's sets")
    options = parser.parse_args()
    for name in options.names:
        train(name, options.root.resolve())


if __name__ == "__main__":
    main()
