"""ResNet-18 (BatchNorm) and a small ViT (LayerNorm), pretrained on seven classes and adapted to others with few images.

    python -m benchmarks.finetune.data --root DATA --out finetune.npz
    python -m benchmarks.finetune --images finetune.npz [--networks resnet18_imagenet vit] [--targets cifar svhn]
        [--shots 500 2000] [--seeds 0 1 2] [--pretrain-epochs 20] [--json finetune_normalised.json] [--table]

A seed draws pretrained weights, training images, initial last layer and batches. Every method has 300 validation images
beside the training images; they fit one temperature for each, choose Laplace's prior, and serve callbacks as in any run.
``three`` is an ensemble of three networks with the same pretrained weights and images. `OOD` are images of the other
target. Runs in the JSON file are skipped; `--minutes` stops before a run that would start later.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.defaults.mode_table import table
from benchmarks.defaults.modes import scores
from benchmarks.finetune.data import TARGETS, pretraining, target
from benchmarks.finetune.methods import METHODS, Adaptation, results
from benchmarks.finetune.networks import DEVICE, NETWORKS, pretrain
from benchmarks.provenance import save_json, saved_rows

UPDATES: Final = {500: 140, 2000: 310}  # of an adaptation, in batches of 64: 20 and 10 epochs
Record = dict[str, Any]


def run_network(name: str, seed: int, arrays: Any, options: argparse.Namespace, records: list[Record]) -> None:
    """Pretrain once, and adapt to every target that has methods without a record."""
    done = {(r["problem"], r["method"], r["seed"]) for r in records}
    weights = None
    for shots in options.shots:
        for wanted in options.targets:
            problem = f"{name} {wanted} {shots}"
            missing = [method for method in options.methods if (problem, method, seed) not in done]
            if not missing or time.monotonic() > options.end:
                continue
            weights = weights or pretrain(NETWORKS[name], pretraining(arrays), seed, options.pretrain_epochs)
            images, batches = target(arrays, wanted, shots, seed), max(1, shots // 64)
            epochs = -(-options.updates.get(shots, 1) // batches)
            job = Adaptation(NETWORKS[name], weights, images, seed, epochs)
            for method, logits, seconds in results(job, missing):
                if (problem, method, seed) not in done:
                    key = {"problem": problem, "method": method, "seed": seed, "seconds": round(seconds, 2)}
                    records.append({**key, **scores(logits, images)})
                    print({n: round(v, 4) if isinstance(v, float) else v for n, v in records[-1].items()}, flush=True)
                    save_json(options.json, {"pretrain_epochs": options.pretrain_epochs, "runs": records})
                if time.monotonic() > options.end:
                    break


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, default=Path("finetune.npz"))
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["resnet18_imagenet", "vit"])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--shots", nargs="+", type=int, default=list(UPDATES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--pretrain-epochs", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true")
    return parser.parse_args(arguments, argparse.Namespace(updates=UPDATES))


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, save every record at once, and print the table."""
    options = _options(arguments)
    options.end = time.monotonic() + 60 * options.minutes
    records: list[Record] = saved_rows(options.json, "runs")
    if DEVICE.type == "cuda":
        torch.set_float32_matmul_precision("high")
    arrays = {} if options.table else dict(np.load(options.images))
    for seed in [] if options.table else options.seeds:
        for name in options.networks:
            run_network(name, seed, arrays, options, records)
    print(table(records, tempered={"user", "vogn", "vogn@0.1", "three"}))


if __name__ == "__main__":
    main()
