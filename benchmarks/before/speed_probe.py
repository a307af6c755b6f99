"""Run inside a tree: a worker that times blocks of optimizer steps on demand.

The text of this file runs by ``python -c`` with the tree as working directory, so it imports nothing of the repository but
the package, and only its public names. The worker reads one line per block, ``METHOD MODEL STEPS``, and prints the seconds
per step, measured with the clock that its first argument names.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch.nn.functional import cross_entropy

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
BATCH = 32
NUM_DATA = 50_000
MODELS: dict[str, dict[str, Any]] = {"lenet5": {"in_channels": 3, "image_size": 32}, "resnet18": {}}


@cache
def training_step(method: str, model_name: str) -> Callable[[], None]:
    """Build a model and its optimizer, as the callback sets it up by default, and return the training step."""
    torch.manual_seed(0)
    model = import_module("lightning_bayes.zoo").create_model(model_name, num_classes=10, **MODELS[model_name])
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    arguments: dict[str, Any] = {"num_data": NUM_DATA, "relative_noise": 0.3}
    arguments["base"] = torch.optim.Adam(model.parameters(), lr=1e-4)
    if method == "NoisyKFAC":
        arguments |= {"damping": 1e-3, "likelihood": import_module("lightning_bayes.curvature").Softmax()}
    optimizer = getattr(import_module("lightning_bayes"), method)(model, **arguments)

    def step() -> None:
        with optimizer.sampled_params():
            cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def seconds_per_step(step: Callable[[], None], steps: int, clock: Callable[[], float]) -> float:
    """Time a block of steps."""
    start = clock()
    for _ in range(steps):
        step()
    return (clock() - start) / steps


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(sys.argv[2]))
    for line in sys.stdin:
        method, model_name, steps = line.split()
        print(seconds_per_step(training_step(method, model_name), int(steps), CLOCKS[sys.argv[1]]), flush=True)
