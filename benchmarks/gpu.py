"""Everything that waits for a GPU, in the order of its value, one part per command.

    python -m benchmarks.gpu tests --out FOLDER                     -m gpu and nccl
    python -m benchmarks.gpu speed --out FOLDER                     time and memory of an update
    python -m benchmarks.gpu osawa --out FOLDER --root DATA         ResNet-18, Osawa et al. 2019, Table 1
    python -m benchmarks.gpu vgg16 --out FOLDER --root DATA         VGG16, Zhang et al. 2018, Table 2
    python -m benchmarks.gpu resnet20 --out FOLDER --root DATA      ResNet-20 (FRN) with IVON, Shen et al. 2024
    python -m benchmarks.gpu war_and_peace --out FOLDER --text FILE   Khan et al. 2018, Figure 8

A command stops after `--minutes`, 9 by default, and the same command goes on from there: JSON and checkpoints are in the
folder. Parts can run side by side on one GPU. `--smoke` runs each part for one batch or epoch, as the tests do on a CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

from benchmarks.papers import war_and_peace
from benchmarks.papers.cifar10 import __main__ as cifar10
from benchmarks.speed import __main__ as benchmark
from benchmarks.speed.fits import METHODS, PRECISIONS

SPEED: Final = {"lenet5": 128, "resnet18": 128, "vit_small": 128}  # network: size of a batch


def speed(options: argparse.Namespace) -> None:
    """`benchmarks.speed` for each network and number format that has no file yet."""
    end = time.monotonic() + 60 * options.minutes
    for network, precision in product(options.networks, PRECISIONS):
        path = options.out / f"speed_{network}_{precision}.json"
        if path.exists() or time.monotonic() > end:
            continue
        arguments = ["--networks", network, "--precision", precision, "--device", options.device, "--clock", "wall"]
        arguments += [
            "--batch",
            "2" if options.smoke else str(SPEED[network]),
            "--rounds",
            "1" if options.smoke else "5",
        ]
        benchmark.main([*arguments, "--methods", *METHODS, "--json", str(path)])


def run_tests(options: argparse.Namespace) -> None:
    """The tests that need a GPU, with an absolute path to this checkout."""
    root = Path(__file__).resolve().parents[1]
    tests = ["tests/predictive/test_dropout.py", "tests/strategies/test_nccl.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *tests, *["--collect-only"] * options.smoke]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    (options.out / "tests.txt").write_text(found.stdout + found.stderr, "utf-8")
    print(found.stdout[-2000:])


def accelerator(options: argparse.Namespace) -> str:
    """Lightning's name of the device."""
    return "gpu" if options.device == "cuda" else "cpu"


def images(model: str, epochs: int, runs: dict[str, list[str]], options: argparse.Namespace) -> None:
    """Runs of `benchmarks.papers.cifar10` by settings, with the training images on the device."""
    end = time.monotonic() + 60 * options.minutes
    for settings, methods in runs.items():
        left = (end - time.monotonic()) / 60
        if left < 0 and not options.smoke:
            break
        arguments = ["--root", options.root, "--model", model, "--settings", settings, "--methods", *methods]
        arguments += ["--epochs", "1" if options.smoke else epochs, "--ood", *options.ood, "--device", options.device]
        arguments += ["--accelerator", accelerator(options), "--minutes", 60 if options.smoke else left]
        arguments += ["--work", options.out / model, "--json", options.out / f"{model}.json"]
        cifar10.main([*map(str, arguments)])


def text(options: argparse.Namespace) -> None:
    """The character model."""
    arguments = ["--path", options.text, "--epochs", 1 if options.smoke else 200, "--minutes", options.minutes]
    arguments += ["--work", options.out / "text", "--json", options.out / "war_and_peace.json"]
    arguments += ["--accelerator", accelerator(options)]
    small = ["--seeds", 1, "--hidden", 8, "--methods", "adam"] if options.smoke else ["--seeds", 1]
    war_and_peace.main([*map(str, arguments), *map(str, small)])


OSAWA: Final = {"published": ["vogn", "adam"], "default": ["vogn", "ivon", "noisy_kfac", "adam"]}
ZHANG: Final = {"published": ["sgd", "noisy_kfac"], "default": ["vogn", "bbb"]}
SHEN: Final = {"published": ["ivon", "sgd"], "default": ["ivon", "vogn"]}
PARTS: Final[dict[str, Callable[[argparse.Namespace], None]]] = {
    "tests": run_tests,
    "speed": speed,
    "osawa": partial(images, "resnet18", 161, OSAWA),
    "vgg16": partial(images, "vgg16", 200, ZHANG),
    "resnet20": partial(images, "resnet20", 200, SHEN),
    "war_and_peace": text,
}


def main(arguments: list[str] | None = None) -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True, help="folder of results and checkpoints")
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder with CIFAR-10")
    parser.add_argument("--text", type=Path, default=Path("war_and_peace.txt"))
    parser.add_argument("--ood", nargs="*", default=[], help="svhn, or folders of images")
    parser.add_argument("--networks", nargs="+", default=list(SPEED), choices=SPEED, help="of the part speed")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="one batch or epoch of each")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
