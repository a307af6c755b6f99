"""Run inside a tree: print the inheritance of its classes and the functions that one batch of VOGN calls, as JSON.

The text of this file runs by ``python -c`` with the tree as working directory, so it imports nothing of the repository but
the package. Two batches of a fit of each network are traced, from the first hook of a batch to the end of the update: the
fourth, which measures the curvature, and the fourteenth, which does not.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import pkgutil
import sys
import warnings
from types import CodeType, FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

PACKAGE = "lightning_bayes"
TRACED = {"measured": 3, "not measured": 13}  # the first ten updates measure, then every tenth
NETWORKS = {"MLP": (5,), "LeNet": (1, 28, 28)}  # with the shape of an input
_FOLDERS = tuple(name + os.sep for name in (PACKAGE, "callbacks", "zoo", "configs"))


def own_classes() -> set[type]:
    """Import every module of the package and collect the classes that it defines."""
    package = importlib.import_module(PACKAGE)
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    classes = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    return {cls for cls in classes if cls.__module__.startswith(PACKAGE)}


def inheritance(classes: set[type]) -> dict[str, Any]:
    """The longest chain of own classes, the classes at its end, and the concrete classes that have subclasses."""

    def levels(cls: type) -> int:
        return 1 + max((levels(base) for base in cls.__bases__ if base in classes), default=0)

    parents = {base for cls in classes for base in cls.__bases__ if base in classes}
    concrete = {cls for cls in parents if not inspect.isabstract(cls) and not getattr(cls, "_is_protocol", False)}
    deepest = max(map(levels, classes))
    return {
        "levels": deepest,
        "deepest": sorted(cls.__name__ for cls in classes if levels(cls) == deepest),
        "subclassed": sorted(f"{cls.__module__}.{cls.__name__}" for cls in concrete),
    }


class CallRecorder:
    """Records the functions of a tree that are called, as file and name; a function for ``sys.setprofile``."""

    def __init__(self, root: str) -> None:
        self._prefix = os.path.realpath(root) + os.sep
        self._names: dict[CodeType, str] = {}
        self.calls: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call."""
        code = frame.f_code
        if event == "call" and code not in self._names:
            self._names[code] = file = self._file(code)
            if file:
                name = getattr(code, "co_qualname", code.co_name)
                self.calls.add((file, f"{name}:{code.co_firstlineno}"))

    def _file(self, code: CodeType) -> str:
        """The path inside the tree; empty for other libraries, lambdas, comprehensions and generated code."""
        if code.co_filename.startswith("<") or code.co_name.startswith("<"):
            return ""
        inside = os.path.realpath(code.co_filename).removeprefix(self._prefix)
        return inside if inside.startswith(_FOLDERS) else ""


def network(name: str) -> nn.Sequential:
    """A two-layer perceptron, or LeNet-5 with ReLUs."""
    if name == "MLP":
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    first = nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
    second = nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    head = nn.Sequential(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))
    return nn.Sequential(*first, *second, *head)


class Classifier(LightningModule):
    """A network with cross-entropy and Adam."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def traced_batches(root: str, name: str) -> dict[str, list[tuple[str, str]]]:
    """The distinct functions of the tree that a measured batch and another one call, private ones included."""
    torch.manual_seed(0)
    recorders = {batch: CallRecorder(root) for batch in TRACED.values()}
    inputs = torch.randn(32 * (max(TRACED.values()) + 1), *NETWORKS[name])
    begin = LambdaCallback(on_train_batch_start=lambda *of: sys.setprofile(recorders.get(of[-1])))
    end = LambdaCallback(on_train_batch_end=lambda *of: sys.setprofile(None))
    callback = importlib.import_module(PACKAGE).VOGNCallback()  # ends the batch after `end`
    keys = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    silent: dict[str, Any] = dict.fromkeys(keys, False)
    trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=[begin, end, callback], **silent)
    data = TensorDataset(inputs, torch.randint(3, (len(inputs),)))
    trainer.fit(Classifier(network(name)), DataLoader(data, batch_size=32))
    return {f"{name}, {kind}": sorted(recorders[batch].calls) for kind, batch in TRACED.items()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    batches = {kind: calls for name in NETWORKS for kind, calls in traced_batches(os.getcwd(), name).items()}
    print(json.dumps({"batches": batches, "classes": inheritance(own_classes())}))
