"""Everything that waits for a GPU, in the order of its value, one part per command.

    python -m benchmarks.gpu tests --out FOLDER                     -m gpu and nccl
    python -m benchmarks.gpu speed --out FOLDER                     time and memory of an update
    python -m benchmarks.gpu osawa --out FOLDER --root DATA         ResNet-18, Osawa et al. 2019, Table 1
    python -m benchmarks.gpu vgg16 --out FOLDER --root DATA         VGG16, Zhang et al. 2018, Table 2
    python -m benchmarks.gpu resnet20 --out FOLDER --root DATA      ResNet-20 (FRN) with IVON, Shen et al. 2024
    python -m benchmarks.gpu war_and_peace --out FOLDER --text FILE   Khan et al. 2018, Figure 8

A command stops after `--minutes`, 9 by default, and the same command goes on from there: JSON and checkpoints are in the
folder. Parts can run side by side on one GPU. `--smoke` runs each part for one batch or epoch, as the tests do on a CPU.
Targets of *speed*: on ResNet-18 with batches of 128, VOGN and IVON take at most 1.15 of Adam's time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from benchmarks.papers import war_and_peace
from benchmarks.papers.cifar10 import __main__ as cifar10
from benchmarks.provenance import save_json, saved_rows
from lightning_bayes import IVON, VOGN, NoisyKFAC
from lightning_bayes.zoo import LeNet5, ResNet18

BASELINE: Final = "Adam"
TARGETS: Final = {("resnet18@128", "VOGN"): 1.15, ("resnet18@128", "IVON"): 1.15}
NUMBERS: Final = ("fp32", "tf32", "bf16")
ROUNDS: Final = 5


class Network(NamedTuple):
    """A network, and the size of its batches."""

    build: Callable[[], nn.Module]
    batch: int


def vit_small() -> nn.Module:
    """Timm's ViT-S for images of 32 pixels."""
    import timm

    return timm.create_model("vit_small_patch16_224", img_size=32, patch_size=4, num_classes=10)


NETWORKS: Final = {
    "lenet5@128": Network(partial(LeNet5, num_classes=10, in_channels=3, image_size=32), 128),
    "resnet18@128": Network(partial(ResNet18, num_classes=10), 128),
    "resnet18@512": Network(partial(ResNet18, num_classes=10), 512),
    "vit_small@128": Network(vit_small, 128),
}


def adam(model: nn.Module) -> Optimizer:
    """The fused Adam, where the device has one."""
    return torch.optim.Adam(model.parameters(), 1e-4, fused=next(model.parameters()).is_cuda)


def ivon_opt(model: nn.Module) -> Optimizer:
    """The authors' IVON."""
    import ivon

    return ivon.IVON(model.parameters(), lr=1e-4, ess=50_000)


METHODS: Final[dict[str, Callable[[nn.Module], Any]]] = {
    BASELINE: adam,
    "VOGN": lambda model: VOGN(model, base=adam(model), num_data=50_000),
    "VOGN, T = 1": lambda model: VOGN(model, base=adam(model), num_data=50_000, curvature_interval=1),
    "IVON": lambda model: IVON(model, base=adam(model), num_data=50_000),
    "ivon-opt": ivon_opt,
    "Noisy K-FAC": lambda model: NoisyKFAC(model, base=adam(model), num_data=50_000),
}


def time_updates(method: str, network: Network, numbers: str, device: str, updates: int) -> dict[str, float]:
    """Milliseconds of an update, median over rounds of `updates`, and the largest memory in MiB."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = numbers != "fp32"
    model = network.build().to(device)
    optimizer = METHODS[method](model)
    images, labels = (
        torch.randn(network.batch, 3, 32, 32, device=device),
        torch.randint(10, (network.batch,), device=device),
    )
    sampled = getattr(optimizer, "sampled_params", None)

    def update() -> None:
        optimizer.zero_grad()
        with nullcontext() if sampled is None else sampled(**({"train": True} if method == "ivon-opt" else {})):
            with torch.autocast(device, torch.bfloat16, enabled=numbers == "bf16"):
                loss = cross_entropy(model(images), labels)
            loss.backward()
        optimizer.step()

    def timed(count: int) -> float:
        _wait(device)
        start = time.perf_counter()
        for _ in range(count):
            update()
        _wait(device)
        return 1e3 * (time.perf_counter() - start) / count

    timed(updates)  # the first updates measure the curvature, later one in ten does
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    milliseconds = statistics.median(timed(updates) for _ in range(ROUNDS if updates > 1 else 1))
    return {"ms": milliseconds, "mib": torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def speed(options: argparse.Namespace) -> None:
    """Time what is missing, and print the table."""
    path = options.out / "speed.json"
    rows, end = saved_rows(path), time.monotonic() + 60 * options.minutes
    for network, numbers, method in product(options.networks, NUMBERS, METHODS):
        key = {"network": network, "numbers": numbers, "method": method}
        if time.monotonic() > end or any(key.items() <= row.items() for row in rows):
            continue
        size = NETWORKS[network]._replace(batch=2) if options.smoke else NETWORKS[network]
        try:
            found: dict[str, Any] = dict(
                time_updates(method, size, numbers, options.device, 1 if options.smoke else 20)
            )
        except Exception as error:  # a row says what its combination raised, and the others run
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        rows.append({**key, **found})
        save_json(path, {"device": device_name(options.device), "results": rows})
    print("\n".join(speed_table(rows)))


def device_name(device: str) -> str:
    """The name of the GPU."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def speed_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A Markdown table: milliseconds, ratio to Adam with the same numbers, memory."""
    yield "| network | numbers | method | ms | ratio to Adam | MiB | target |\n" + "|---" * 7 + "|"
    base = {(row["network"], row["numbers"]): row.get("ms") for row in rows if row["method"] == BASELINE}
    for row in rows:
        start = f"| {row['network']} | {row['numbers']} | {row['method']}"
        own, other = row.get("ms"), base.get((row["network"], row["numbers"]))
        if own is None or other is None:
            yield f"{start} | {row.get('error', '')} | | | |"
            continue
        target = TARGETS.get((row["network"], row["method"]))
        verdict = "" if target is None else f"≤ {target}: {'met' if own / other <= target else 'MISSED'}"
        yield f"{start} | {own:.2f} | {own / other:.2f} | {row['mib']:.0f} | {verdict} |"


def run_tests(options: argparse.Namespace) -> None:
    """The tests that need a GPU, with an absolute path to this checkout."""
    root = Path(__file__).resolve().parents[1]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "tests/predictive/test_dropout.py",
        "tests/strategies/test_nccl.py",
    ]
    command += ["--collect-only"] if options.smoke else []
    environment = {**os.environ, "PYTHONPATH": str(root)}
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    (options.out / "tests.txt").write_text(found.stdout + found.stderr, "utf-8")
    print(found.stdout[-2000:])


def images(model: str, epochs: int, runs: dict[str, list[str]], options: argparse.Namespace) -> None:
    """Runs of `benchmarks.papers.cifar10` by settings, with the training images on the device."""
    end = time.monotonic() + 60 * options.minutes
    for settings, methods in runs.items():
        left = (end - time.monotonic()) / 60
        if left < 0 and not options.smoke:
            break
        arguments = ["--root", options.root, "--model", model, "--settings", settings, "--methods", *methods]
        arguments += ["--epochs", "1" if options.smoke else epochs, "--ood", *options.ood, "--device", options.device]
        arguments += [
            "--accelerator",
            "gpu" if options.device == "cuda" else "cpu",
            "--minutes",
            60 if options.smoke else left,
        ]
        cifar10.main(
            [*map(str, arguments), "--work", str(options.out / model), "--json", str(options.out / f"{model}.json")]
        )


def text(options: argparse.Namespace) -> None:
    """The character model."""
    arguments = ["--path", options.text, "--epochs", 1 if options.smoke else 200, "--minutes", options.minutes]
    arguments += ["--work", options.out / "text", "--json", options.out / "war_and_peace.json"]
    arguments += ["--accelerator", "gpu" if options.device == "cuda" else "cpu"]
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
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS, help="of the part speed")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="one batch or epoch of each")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
