"""Run inside a tree: train small networks for 50 steps with every optimizer and callback, and save the weights of each step.

The text of this file runs by ``python -c`` with the tree as working directory, so it imports nothing of the repository but
the package, and only its public names. All arithmetic is in float64, where rounding differences stay far below 1e-6.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

STEPS = 50
BATCH = 16
NUM_DATA = 64
SMALL = ("FullVON", "VONG", "NNGFull", "BlockTridiagonalKFAC")  # for small networks of linear layers
WITHOUT_BATCHNORM = ("VON", "MomentumVON", "NoisyAdamFisher", "CVI")
OPTIMIZERS = (
    *("VOGN", "OGN", "Vadam", "Vprop", "Vprop0", "VadaGrad", "VON", "ReparameterisedVON", "MomentumVON", "NoisyAdam"),
    *("NoisyAdamFisher", "IVON", "BBB", "CVI", "KFAC", "NoisyKFAC", *SMALL),
)
BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


def network(kind: str, name: str) -> nn.Sequential:
    """Build a network: ``"mlp"``, or ``"conv"`` with BatchNorm if the method supports it."""
    torch.manual_seed(0)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    norm = nn.Identity() if name.removesuffix("Callback") in WITHOUT_BATCHNORM else nn.BatchNorm2d(4)
    layers = (nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))
    return nn.Sequential(*layers).double()


def data(kind: str) -> tuple[Tensor, Tensor]:
    """Draw inputs and labels."""
    generator = torch.Generator().manual_seed(1)
    shape = (1, 8, 8) if kind == "conv" else (5,)
    inputs = torch.randn(NUM_DATA, *shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (NUM_DATA,), generator=generator)


def weights(model: nn.Module) -> Tensor:
    """All weights as one vector."""
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def steps_of(name: str, kind: str, **arguments: Any) -> Tensor:
    """The weights of 50 steps with one or two passes each, and a sample of the posterior."""
    model = network(kind, name)
    inputs, labels = data(kind)
    optimizer = getattr(import_module("lightning_bayes.optim"), name)(model, num_data=NUM_DATA, **arguments)
    path = []
    for step in range(STEPS):
        rows = slice(step % 4 * BATCH, (step % 4 + 1) * BATCH)
        for _ in range(2 if step % 3 == 0 else 1):
            with optimizer.sampled_params():
                cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        path.append(weights(model))
    if getattr(optimizer, "noisy", True):
        sample = optimizer.posterior().sample(torch.Generator().manual_seed(3))
        path.append(torch.cat([value.flatten().double() for value in sample.values()]))
    return torch.cat(path)


def steps_of_fit(name: str, base: str, **arguments: Any) -> Tensor:
    """The weights of a fit with a callback, for 13 epochs of four batches."""
    model = network("conv", name)
    path: list[Tensor] = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return BASES[base](self.parameters())

    class Recorder(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            path.append(weights(model))

    callback = getattr(import_module("lightning_bayes"), name)(**arguments)
    keys = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    silent: dict[str, Any] = dict.fromkeys(keys, False)
    trainer = Trainer(max_epochs=13, accelerator="cpu", callbacks=[callback, Recorder()], **silent)
    trainer.fit(Module(), DataLoader(TensorDataset(*data("conv")), batch_size=BATCH))
    return torch.cat(path)


def cases() -> dict[str, Callable[[], Tensor]]:
    """All trajectories by name."""

    def plain(name: str, kind: str = "mlp", **arguments: Any) -> Callable[[], Tensor]:
        return lambda: steps_of(name, kind, **arguments)

    def fit(name: str, base: str, **arguments: Any) -> Callable[[], Tensor]:
        return lambda: steps_of_fit(name, base, **arguments)

    trajectories: dict[str, Callable[[], Tensor]] = {}
    for name in OPTIMIZERS:
        required: dict[str, Any] = {"FullVON": {"prior_precision": 100.0}}.get(name, {})
        if name == "NNGFull":
            required = {"likelihood": import_module("lightning_bayes.curvature").Softmax()}
        tempered = {"kl_weight": 1.0 if name == "VadaGrad" else 0.5, "prior_precision": 2.0, "seed": 3}
        trajectories[f"{name}, MLP"] = plain(name, **required)
        trajectories[f"{name}, MLP, tempered"] = plain(name, **{"lr": 0.01, **tempered, **required})
        if name not in SMALL:
            trajectories[f"{name}, convolution"] = plain(name, "conv", lr=0.01)
    damped = {"lr": 0.02, "damping": 0.1, "damping_in_noise": True, "relative_noise": 0.3}
    prior = {"prior_mean": "initial", "kl_warmup_steps": 10, "weight_decay": 0.01, "data_augmentation_factor": 2.0}
    for name in ("VOGN", "Vadam", "KFAC", "NoisyKFAC"):
        trajectories[f"{name}, MLP, damping and prior"] = plain(name, **damped, **prior)
        trajectories[f"{name}, MLP, trust region"] = plain(name, lr=0.02, step_rule="trust_region")
    clipped = {"lr": 0.02, "kl_clip": 1e-3, "stats_interval": 2, "inverse_interval": 4}
    for name in ("KFAC", "NoisyKFAC"):
        trajectories[f"{name}, convolution, KL clip"] = plain(name, "conv", **clipped)
    for name in sorted(f"{optimizer}Callback" for optimizer in OPTIMIZERS if optimizer not in SMALL):
        if hasattr(import_module("lightning_bayes"), name):
            trajectories |= {f"{name}(), {base}": fit(name, base) for base in ("adam", "sgd")}
            trajectories[f"{name}(lr=0.01), adamw"] = fit(name, "adamw", lr=0.01)
    return trajectories


def attempt(case: Callable[[], Tensor]) -> Tensor | str:
    """Run a case; an error becomes its result."""
    try:
        return case()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    recorded = {name: attempt(case) for name, case in cases().items()}
    torch.save(recorded, sys.argv[1])
    print(json.dumps(len(recorded)))
