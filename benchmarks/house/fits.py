"""Run inside a tree: print the trajectories of short fits by case, as JSON; see `benchmarks.house.trajectories`."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_bayes as lb

BATCHES, ROWS, CLASSES = 24, 8, 3
METHODS: dict[str, Callable[[], Any]] = {
    "VOGN": lambda: lb.VOGNCallback(),
    "VOGN, paper": lambda: lb.VOGNCallback(lr=1e-2, prior_precision=1.0),
    "VOGN, two samples": lambda: lb.VOGNCallback(mc_samples=2, antithetic=True),
    "VOGN, backpack": lambda: lb.VOGNCallback(engine="backpack"),
    "OGN": lambda: lb.OGNCallback(),
    "IVON": lambda: lb.IVONCallback(),
    "Noisy Adam": lambda: lb.NoisyAdamCallback(lr=1e-2, prior_precision=1.0),
    "Vadam": lambda: lb.VadamCallback(lr=1e-2, prior_precision=1.0),
    "Bayes by Backprop": lambda: lb.BBBCallback(lr=1e-2, prior_precision=1.0),
    "Noisy K-FAC": lambda: lb.NoisyKFACCallback(),
}


class TransformerNet(nn.Module):
    """Embedding, position parameter, one encoder layer, mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(11, 8), nn.Parameter(torch.randn(5, 8) / 10)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        output: Tensor = self.head(self.layer(self.embedding(x) + self.positions).mean(1))
        return output


def _images() -> Tensor:
    return torch.randn(BATCHES * ROWS, 1, 8, 8)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "MLP": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
        lambda: torch.randn(BATCHES * ROWS, 5),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(),
            nn.Dropout(0.2), nn.Linear(24, CLASSES),
        ),
        _images,
    ),
    "batch norm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, groups=2),
            nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES),
        ),
        _images,
    ),
    "transformer": (TransformerNet, lambda: torch.randint(11, (BATCHES * ROWS, 5))),
}  # fmt: skip


class Module(LightningModule):
    """A classifier with AdamW and a schedule."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Return AdamW with a decaying learning rate."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Case(NamedTuple):
    """One fit."""

    method: str
    network: str
    trainer: str  # "plain", "accumulation", "resume" or "two processes"

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.method}, {self.network}, {self.trainer}"


def cases() -> Iterator[Case]:
    """All methods on all networks with and without accumulation; resumes; two processes."""
    for method in METHODS:
        for network in NETWORKS:
            if (method, network) == ("VOGN, backpack", "transformer"):  # BackPACK has no rule for it
                continue
            yield Case(method, network, "plain")
            yield Case(method, network, "accumulation")
        yield Case(method, "convolutions", "resume")
        yield Case(method, "MLP", "two processes")


def trained(case: Case, folder: str) -> str:
    """The hash of the weights and of the optimizer's state after a fit."""
    seed_everything(0, verbose=False)
    new_network, new_inputs = NETWORKS[case.network]
    module = Module(new_network())
    loader = DataLoader(TensorDataset(new_inputs(), torch.randint(CLASSES, (BATCHES * ROWS,))), batch_size=ROWS)
    if case.trainer == "resume":
        first, _ = _trainer(case, max_steps=13)
        first.fit(module, loader)
        first.save_checkpoint(path := str(Path(folder, f"{hash(case)}.ckpt")))
        trainer, callback = _trainer(case)
        trainer.fit(module, loader, ckpt_path=path)
    else:
        trainer, callback = _trainer(case)
        trainer.fit(module, loader)
    digest = hashlib.sha256()
    for param in module.parameters():
        state = {} if case.trainer == "two processes" else callback.optimizer.state[param]
        for value in (param, *(state[name] for name in sorted(state))):
            if isinstance(value, Tensor):
                digest.update(value.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def _trainer(case: Case, **options: Any) -> tuple[Trainer, Any]:
    keys = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options |= dict.fromkeys(keys, False)
    if case.trainer == "accumulation":
        options["accumulate_grad_batches"] = 2
    if case.trainer == "two processes":
        options |= {"strategy": "ddp_fork", "devices": 2}
    callback = METHODS[case.method]()
    options |= {"max_epochs": 2, "limit_train_batches": BATCHES // 2, "accelerator": "cpu", "callbacks": [callback]}
    return Trainer(**options), callback


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    chosen = [case for case in cases() if len(sys.argv) < 2 or sys.argv[1] in case.name]
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, str] = {}
        for case in chosen:
            try:
                results[case.name] = trained(case, folder)
            except Exception as error:  # a case that one tree refuses differs from one that runs
                results[case.name] = f"{type(error).__name__}: {str(error)[:200]}"
        print(json.dumps(results))
